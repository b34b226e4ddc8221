"""A recurrent model: what has no place in the integer engine stays in float, and the record says why.

python examples/lstm/quantize.py
python examples/lstm/quantize.py --model model.onnx --data inputs.npz --exclude /decoder/*
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import onnxruntime as ort
from network import fitted, signals

import roundel
from table import show


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="float model; the one of network.py when not given")
    parser.add_argument("--data", type=Path, help="its samples")
    parser.add_argument("--exclude", action="append", default=[], help="more that stays in float")
    args = parser.parse_args()
    calib, _ = signals(64, seed=2)
    judged, labels = signals(400, seed=3)
    model = fitted() if args.model is None else args.model
    rows = []
    for preset in ("a8w8", "a16w8", "bf16"):
        data = [{"signal": signal[None]} for signal in calib] if args.data is None else args.data
        result = roundel.quantize(model, recipe=preset, data=data, exclude=args.exclude)
        counts = result.record.counts
        left = ", ".join(f"{op} ({why})" for op, why in reasons(result).items()) or "none"
        right = "" if args.model else f"{accuracy(result.model, judged, labels):.1%}"
        out = result.record.outputs[0]
        row = (preset, sum(counts["quantized_nodes"].values()), left, f"{out.sqnr_db:.1f} dB", right)
        rows.append(row)
    if args.model is None:
        rows.insert(0, ("float", 0, "all", "", f"{accuracy(model, judged, labels):.1%}"))
    show(("preset", "quantized nodes", "left in float", "SQNR", "accuracy"), rows)


def reasons(result: roundel.QuantizeResult) -> dict[str, str]:
    """By operator, why it stays in float."""
    return {node.op: node.reason for node in result.plan.nodes.values() if not node.quantized}


def accuracy(model: object, x: object, labels: object) -> float:
    content = model.SerializeToString()  # type: ignore[attr-defined]
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(content, options, ["CPUExecutionProvider"])
    return float((session.run(None, {"signal": x})[0].argmax(1) == labels).mean())


if __name__ == "__main__":
    main()
