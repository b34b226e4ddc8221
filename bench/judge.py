"""Judges one quantized file of the zoo against its float model, in ``ort`` (Quark's files in ``quark``).

Signal and noise are summed over the unseen samples, for each output and over all. As in ``evaluate.py``, Q/DQ
pairs are computed in float as written.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort

from evaluate import file_size, open_session
from peers.protocol import emit, load_samples


def stock_error(path: Path) -> str:
    """Why a plain session refuses the file; empty when it does not."""
    try:
        ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    # ONNX Runtime's errors have no common class below this one.
    except Exception as error:  # noqa: BLE001
        return str(error)[:200]
    return ""


def quantizers(path: Path) -> int:
    """Nodes that quantize, in the standard or in a tool's own form. A file without any was only copied."""
    nodes = onnx.load(str(path), load_external_data=False).graph.node
    return sum("Quantize" in node.op_type for node in nodes)


def decibels(signal: float, noise: float) -> float | None:
    """Signal over noise; None where both files say the same, and for silence."""
    return 10 * math.log10(signal / noise) if noise > 0 and signal > 0 else None


def powers(reference: Any, actual: Any) -> npt.NDArray[np.float64]:
    """Signal and noise of one output; where either is not finite, all of it is noise."""
    expected, found = (np.asarray(value, np.float64) for value in (reference, actual))
    noise = np.square(expected - found)
    return np.array([np.square(expected).sum(), np.where(np.isfinite(noise), noise, np.inf).sum()])


def main() -> None:
    """Judges the file given on the command line and prints the result line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--float", dest="float_model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--quantized", type=Path, required=True)
    parser.add_argument("--library", type=Path)
    args = parser.parse_args()
    before, after = open_session(args.float_model, None), open_session(args.quantized, args.library)
    sums: Any = 0
    for sample in load_samples(args.data, ""):
        # By name: a tool may order the outputs anew.
        names = [output.name for output in before.get_outputs()]
        pairs = zip(before.run(names, sample), after.run(names, sample), strict=True)
        sums = sums + np.array([powers(*pair) for pair in pairs])
    each = [decibels(*row) for row in sums.tolist()]
    emit(
        {
            "quantizers": quantizers(args.quantized),
            "stock_error": stock_error(args.quantized),
            "sqnr_db": decibels(*sums.sum(0).tolist()),
            "sqnr_min_db": min((value for value in each if value is not None), default=None),
            "outputs_db": each,
            "size_bytes": file_size(args.quantized),
        }
    )


if __name__ == "__main__":
    main()
