"""What `roundel.compare` takes, as a multiple of running both models once over the same images.

usage: python bench/compare.py FLOAT.onnx IMAGES.npz QUANTIZED.onnx ...

The two alternate in one process: plain ONNX Runtime sessions (opened, run, closed) and `compare`, which
loads, matches and prepares both models, runs them and writes its figures. Imports are not counted.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

import roundel
from machine import describe, revision

IMAGES, REPEATS = 32, 5
RESULT = Path(__file__).parent / "results" / "compare.md"


def main(model: str, images: str, *quantized: str) -> None:
    """Print and write a Markdown table with one line for each quantized model."""
    arrays = np.load(images)["x"][:IMAGES]
    name = ort.InferenceSession(model).get_inputs()[0].name
    samples = [{name: arrays[i : i + 1]} for i in range(len(arrays))]
    roundel.compare(model, quantized[0], samples[:1])  # imports
    rows = [
        f"# `compare` on {Path(model).name} with {len(samples)} images",
        "",
        "| quantized model | both models once | `compare` | ratio, median (least to most) |",
        "|---|---|---|---|",
    ]
    for file in quantized:
        plain, full, ratios = [], [], []
        for _ in range(REPEATS):
            plain.append(_seconds(_run_both, (model, file), samples))
            full.append(_seconds(roundel.compare, model, file, samples))
            ratios.append(full[-1] / plain[-1])
        spread = f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})"
        times = f"{statistics.median(plain):.2f} s | {statistics.median(full):.2f} s"
        rows.append(f"| {Path(file).name} | {times} | {spread} |")
        print(rows[-1], flush=True)
    machine = ", ".join(f"{key} {value}" for key, value in describe().items())
    RESULT.write_text("\n".join([*rows, "", f"{REPEATS} repeats. {machine}; {revision()}."]) + "\n")


def _run_both(files: tuple[str, str], samples: list[dict[str, Any]]) -> None:
    for file in files:
        options = ort.SessionOptions()
        options.add_session_config_entry("session.disable_quant_qdq", "1")  # as `compare` computes
        session = ort.InferenceSession(file, options)
        for sample in samples:
            session.run(None, sample)


def _seconds(action: Any, *given: Any) -> float:
    started = time.perf_counter()
    action(*given)
    return time.perf_counter() - started


if __name__ == "__main__":
    if len(sys.argv) < 4:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
