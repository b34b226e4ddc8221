"""How time grows with the number of nodes: `python bench/nodes.py [--nodes 1000,2000,5000,10000]`.

A residual chain (Conv, Relu, Conv, Add, Clip) on tensors so small that only the nodes count.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from memory import RESULTS, measured, write_results

CHANNELS, SIDE = 8, 4


def chain(nodes: int) -> onnx.ModelProto:
    """`nodes` of them, in blocks of five."""
    rng = np.random.default_rng(0)
    made, weights, current = [], [], "x"
    for block in range(nodes // 5):
        names = [f"{block}.{letter}" for letter in "abcde"]
        for part in (0, 2):
            content = rng.normal(0, 0.15, (CHANNELS, CHANNELS, 1, 1)).astype(np.float32)
            weights.append(numpy_helper.from_array(content, f"{names[part]}.w"))
            weights.append(numpy_helper.from_array(np.zeros(CHANNELS, np.float32), f"{names[part]}.b"))
        ends = [f"{name}.y" for name in names]
        made += [
            helper.make_node("Conv", [current, f"{names[0]}.w", f"{names[0]}.b"], [ends[0]], name=names[0]),
            helper.make_node("Relu", [ends[0]], [ends[1]], name=names[1]),
            helper.make_node("Conv", [ends[1], f"{names[2]}.w", f"{names[2]}.b"], [ends[2]], name=names[2]),
            helper.make_node("Add", [ends[2], current], [ends[3]], name=names[3]),
            helper.make_node("Clip", [ends[3], "low", "high"], [ends[4]], name=names[4]),
        ]
        current = ends[4]
    weights += [numpy_helper.from_array(np.float32(v), n) for v, n in ((-4, "low"), (4, "high"))]
    shape = [1, CHANNELS, SIDE, SIDE]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", current)]
    graph = helper.make_graph(made, "chain", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", default="1000,2000,5000,10000")
    parser.add_argument("--recipes", default="xint8,a8w8")
    parser.add_argument("--efforts", default="none,fast")
    parser.add_argument("--out", type=Path, default=RESULTS / "nodes")
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "x.npz"
        np.savez(data, x=np.random.default_rng(1).normal(0, 1, (8, CHANNELS, SIDE, SIDE)).astype(np.float32))
        for effort in given.efforts.split(","):
            for recipe in given.recipes.split(","):
                for nodes in map(int, given.nodes.split(",")):
                    model = Path(folder) / f"{nodes}.onnx"
                    onnx.save(chain(nodes), model)
                    options = {"recipe": recipe, "effort": effort, "samples": 8}
                    rows.append({"nodes": nodes, **measured(model, data, options)})
                    print(rows[-1], flush=True)
    lines = [
        "# Time by number of nodes",
        "",
        "Residual chains on tiny tensors, 8 samples. CPU seconds of the whole process, and milliseconds per",
        "node: where these stay the same, growth is linear. `verify` is mostly ONNX Runtime loading the Q/DQ",
        "file, which has 3.4 times as many nodes.",
        "",
        "| recipe | effort | nodes | CPU s | of it verify | ms per node | peak MB |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        each = 1000 * row["cpu_seconds"] / row["nodes"]
        lines.append(
            f"| {row['recipe']} | {row['effort']} | {row['nodes']} | {row['cpu_seconds']:.1f}"
            f" | {row['steps'].get('verify', 0):.1f} | {each:.1f} | {row['peak_mb']:.0f} |"
        )
    write_results(given.out, lines, rows)


if __name__ == "__main__":
    main()
