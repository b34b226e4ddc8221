"""How time grows: ``python bench/growth.py [--axes samples,nodes,size,k]``, where Roundel is installed.

Networks in which a single thing grows, each run in a process of its own; the exponent is the slope of
a straight line through the logarithms. ``nodes`` is a residual chain (Conv, Relu, Conv, Add, Clip) on tensors
so small that only the nodes count.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import plot
from memory import RESULTS, measured, write_results

CHANNELS, SIDE = 8, 4


class Net:
    """A graph that is written node after node, each after the one before."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.rng = np.random.default_rng(0)
        self.shape = list(shape)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.end = "x"

    def node(self, op: str, *others: str, **attributes: Any) -> str:
        """One more node on the newest value."""
        name = f"{op}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, [self.end, *others], [f"{name}.y"], name, **attributes))
        self.end = f"{name}.y"
        return self.end

    def constant(self, array: Any) -> str:
        """A weight's name."""
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(array, np.float32), name))
        return name

    def conv(self, out: int, into: int, kernel: int = 1, *, stride: int = 1, group: int = 1) -> str:
        """A convolution that keeps the signal's size."""
        fan = into // group * kernel**2
        weight = self.constant(self.rng.normal(0, fan**-0.5, (out, into // group, kernel, kernel)))
        bias = self.constant(np.zeros(out))
        pads = [kernel // 2] * 4
        return self.node("Conv", weight, bias, pads=pads, strides=[stride] * 2, group=group)

    def model(self, out: Sequence[int]) -> onnx.ModelProto:
        """The whole, with the newest value as its output."""
        ends = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name, shape in (("x", self.shape), (self.end, out))
        ]
        graph = helper.make_graph(self.nodes, "growing", ends[:1], ends[1:], self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def chain(nodes: int) -> onnx.ModelProto:
    """``nodes`` of them, in blocks of five."""
    net = Net((1, CHANNELS, SIDE, SIDE))
    low, high = net.constant(-4), net.constant(4)
    for _ in range(nodes // 5):
        before = net.end
        net.conv(CHANNELS, CHANNELS)
        net.node("Relu")
        net.conv(CHANNELS, CHANNELS)
        net.node("Add", before)
        net.node("Clip", low, high)
    return net.model(net.shape)


def convnet(side: int, inner: int) -> onnx.ModelProto:
    """A small classifier; the products of its last convolution have ``inner`` terms."""
    net = Net((1, 3, side, side))
    for out, into, stride, group in ((16, 3, 2, 1), (32, 16, 2, 1), (32, 32, 1, 32)):
        net.conv(out, into, 3, stride=stride, group=group)
        net.node("Relu")
    for out, into in ((inner, 32), (32, inner)):
        net.conv(out, into)
        net.node("Relu")
    net.node("GlobalAveragePool")
    net.conv(10, 32)
    return net.model((1, 10, 1, 1))


@dataclass(frozen=True, slots=True)
class Axis:
    """What grows.

    Attributes:
        title: For the picture.
        values: Where it is measured.
        model: The network at a value.
        samples: Their number at a value.
    """

    title: str
    values: tuple[int, ...]
    model: Callable[[int], onnx.ModelProto]
    samples: Callable[[int], int]


AXES = {
    "samples": Axis("samples", (25, 50, 100, 200, 400), lambda _: convnet(64, 128), lambda value: value),
    "nodes": Axis("nodes", (100, 300, 1000, 3000, 10000), chain, lambda _: 8),
    "size": Axis("side of the image", (32, 64, 128, 256, 512), lambda side: convnet(side, 128), lambda _: 16),
    "k": Axis("terms of a product (K)", (64, 256, 1024, 4096, 16384), lambda k: convnet(32, k), lambda _: 16),
}


def run(axis: Axis, value: int, recipe: str, effort: str, folder: Path) -> dict[str, Any]:
    """One measured quantization."""
    model = axis.model(value)
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    path, data = folder / "model.onnx", folder / "x.npz"
    onnx.save(model, path)
    np.savez(data, x=np.random.default_rng(1).normal(0, 1, (8, *shape[1:])).astype(np.float32))
    return measured(path, data, {"recipe": recipe, "effort": effort, "samples": axis.samples(value)})


def exponent(points: Sequence[plot.Point]) -> float:
    """Slope of the straight line that is nearest to the points' logarithms."""
    logs = np.log(points)
    return float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0])


def table(axis: Axis, series: dict[str, list[plot.Point]]) -> list[str]:
    """One axis: seconds at each value, and the exponents over all values and over the last two."""
    head = [axis.title, *(f"{value:g}" for value in sorted({x for row in series.values() for x, _ in row}))]
    head += ["exponent", "at the end"]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for name, points in series.items():
        cells = [name, *(f"{seconds:.2f}" for _, seconds in points)]
        several = len(points) > 1
        cells += [f"{exponent(part):.2f}" if several else "" for part in (points, points[-2:])]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--axes", default=",".join(AXES))
    parser.add_argument("--most", type=int, help="leaves out values beyond this one")
    parser.add_argument("--recipes", default="xint8,a8w8")
    parser.add_argument("--efforts", default="none,fast")
    parser.add_argument("--out", type=Path, default=RESULTS / "growth")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    panels: dict[str, dict[str, list[plot.Point]]] = {}
    lines = ["# How time grows", "", "Wall seconds of the quantize call, and the slopes of their logarithms."]
    for name in given.axes.split(","):
        axis = AXES[name]
        series = panels.setdefault(axis.title, {})
        for recipe in given.recipes.split(","):
            for effort in given.efforts.split(","):
                points = series.setdefault(f"{recipe} {effort}", [])
                for value in (v for v in axis.values if given.most is None or v <= given.most):
                    with tempfile.TemporaryDirectory() as folder:
                        row = run(axis, value, recipe, effort, Path(folder))
                    rows.append({"axis": name, "value": value, **row})
                    points.append((value, row["seconds"]))
                    print(name, value, recipe, effort, f"{row['seconds']:.2f} s", flush=True)
        lines += ["", *table(axis, series)]
        # After each axis, so that a run that is stopped leaves what it has.
        write_results(given.out, lines, rows)
        given.out.with_suffix(".svg").write_text(plot.curves(panels, "seconds"))


if __name__ == "__main__":
    main()
