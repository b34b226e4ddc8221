"""One plain float forward pass over the calibration data (run in the ``ort`` environment).

The unit that quantization times are divided by: default session options, batch 1, session creation and one
warm-up sample outside the clock; the median of a few passes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import onnxruntime as ort
from protocol import emit, load_samples, peak_rss_mb, versions_of

# A pass over small images takes a tenth of a second, too short to be timed once.
PASSES = 3


def main() -> None:
    """Runs the pass given on the command line and prints its result line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--calib", type=Path, required=True)
    parser.add_argument("--input-name", default="input")
    parser.add_argument("--count", type=int)
    args = parser.parse_args()
    samples = load_samples(args.calib, args.input_name, args.count)
    session = ort.InferenceSession(str(args.model), providers=["CPUExecutionProvider"])
    session.run(None, samples[0])
    passes: list[float] = []
    for _ in range(PASSES):
        started = time.perf_counter()
        for sample in samples:
            session.run(None, sample)
        passes.append(time.perf_counter() - started)
    emit(
        {
            "forward_s": statistics.median(passes),
            "peak_rss_mb": peak_rss_mb(),
            "samples": len(samples),
            "versions": versions_of(("onnxruntime", "numpy")),
        }
    )


if __name__ == "__main__":
    main()
