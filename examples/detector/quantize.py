"""A YOLO-style detector, whole and with its head in float: boxes survive 8 bits, scores beside them do not.

python examples/detector/quantize.py
python examples/detector/quantize.py --model yolo.onnx --data calib.npz --exclude-subgraph 'a->b'
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import onnxruntime as ort
from network import build, images

import roundel
from table import show

# Three ways to say the same: by name, by the tensors around it, by operator.
HEAD = {
    "whole model": {},
    "--exclude 'head/*'": {"selection": {"exclude": ["head/*"]}},
    "--exclude-subgraph": {
        "selection": {"exclude_subgraphs": [{"inputs": ["head/conv_out"], "outputs": ["detections"]}]}
    },
    "--exclude op:Concat": {"selection": {"exclude": ["op:Concat"]}},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="float detector; the one of network.py when not given")
    parser.add_argument("--data", type=Path, help="its samples")
    parser.add_argument("--exclude-subgraph", help="'tensor,…->tensor,…' around its head")
    parser.add_argument("--preset", default="a8w8_minmax")
    args = parser.parse_args()
    if args.model is not None:
        starts, _, ends = (args.exclude_subgraph or "").partition("->")
        border = {"inputs": starts.split(","), "outputs": ends.split(",")}
        changes: dict[str, Any] = {"selection": {"exclude_subgraphs": [border]}} if ends else {}
        result = roundel.quantize(args.model, recipe=args.preset, data=args.data, changes=changes)
        show(("output", "SQNR"), [(out.name, f"{out.sqnr_db:.1f} dB") for out in result.record.outputs])
        return
    model, judged = build(), images(16, seed=1)
    expected = outputs(model, judged)
    rows = []
    for name, changes in HEAD.items():
        result = roundel.quantize(model, recipe=args.preset, data=images(32, seed=0), changes=changes)
        got = outputs(result.model, judged)
        boxes = np.abs(got[..., :4] - expected[..., :4])
        scores = np.abs(got[..., 4:] - expected[..., 4:])
        quantized = sum(result.record.counts["quantized_nodes"].values())
        rows.append(
            (name, quantized, f"{boxes.mean():.2f} px", f"{scores.mean():.4f}", f"{scores.max():.4f}")
        )
    show(("head", "quantized nodes", "box error", "score error", "worst score error"), rows)


def outputs(model: Any, samples: list[dict[str, Any]]) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    return np.concatenate([session.run(None, sample)[0] for sample in samples])


if __name__ == "__main__":
    main()
