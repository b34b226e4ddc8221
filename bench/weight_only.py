"""Measures weight-only quantization of the encoder in `minilm.py`: size, time, closeness to float.

``python bench/weight_only.py FOLDER OUT.md``: FOLDER holds the wheel's `model.safetensors` and `vocab.txt`.
Run it where Roundel is installed. 128 texts calibrate and 150 others judge.
Times are CPU seconds: they mean something on a busy machine, too.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

import minilm
import roundel

CALIBRATION, JUDGES = 128, 150
Samples = list[dict[str, np.ndarray[Any, Any]]]


def measure(path: Path, judges: Samples, wanted: list[np.ndarray[Any, Any]]) -> tuple[float, float, float]:
    """SQNR of the token vectors in dB, mean and smallest cosine of the sentence vectors (their means)."""
    got = outputs(path, judges)
    noise = sum(float(np.square(a - b, dtype=np.float64).sum()) for a, b in zip(wanted, got, strict=True))
    power = sum(float(np.square(a, dtype=np.float64).sum()) for a in wanted)
    cosines = []
    for a, b in zip(wanted, got, strict=True):
        one, other = a[0].mean(0), b[0].mean(0)
        cosines.append(float(one @ other / np.linalg.norm(one) / np.linalg.norm(other)))
    return 10 * float(np.log10(power / noise)), float(np.mean(cosines)), min(cosines)


def outputs(path: Path, judges: Samples) -> list[np.ndarray[Any, Any]]:
    """The token vectors of each text."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return [session.run(None, sample)[0] for sample in judges]


def by_ort(source: Path, target: Path, size: int, symmetric: bool) -> None:
    """ONNX Runtime's own quantizer."""
    logging.disable(logging.INFO)
    tool = MatMulNBitsQuantizer(
        onnx.load(source), bits=4, block_size=size, is_symmetric=symmetric, accuracy_level=1
    )
    tool.process()
    onnx.save(tool.model.model, target)


def by_roundel(source: Path, target: Path, data: Samples, **options: Any) -> None:
    """Roundel's preset with changes; data only where the algorithm learns."""
    given = data if options.get("algorithm") == "gptq" else None
    changes = {"weight_only": options}
    roundel.quantize(source, target, recipe="matmul_nbits", data=given, changes=changes)


def main() -> None:
    """Write the table."""
    folder, table = Path(sys.argv[1]), Path(sys.argv[2])
    pool = minilm.samples(folder, len(minilm.texts()), seed=0)
    data, judges = pool[:CALIBRATION], pool[-JUDGES:]
    rows = [
        "| tool | settings | size, MB | CPU seconds | SQNR, dB | cosine, mean | cosine, worst |",
        "|---" * 7 + "|",
    ]
    with tempfile.TemporaryDirectory() as place:
        source, target = Path(place) / "float.onnx", Path(place) / "packed.onnx"
        onnx.save(minilm.build(folder), source)
        wanted = outputs(source, judges)
        rows.append(f"| float | | {source.stat().st_size / 1e6:.1f} | | | | |")
        for tool, settings, work in runs(source, target, data):
            start = time.process_time()
            work()
            took = time.process_time() - start
            sqnr, mean, worst = measure(target, judges, wanted)
            size = target.stat().st_size / 1e6
            rows.append(
                f"| {tool} | {settings} | {size:.1f} | {took:.0f} | {sqnr:.1f} | {mean:.4f} | {worst:.4f} |"
            )
            print(rows[-1], flush=True)
    table.write_text("\n".join(rows) + "\n", encoding="utf-8")


def runs(source: Path, target: Path, data: Samples) -> list[tuple[str, str, Callable[[], None]]]:
    """(tool, settings, work) of each row."""
    found: list[tuple[str, str, Callable[[], None]]] = []
    variants: dict[str, dict[str, Any]] = {
        "round, minmax": {"range": "minmax"},
        "round": {},
        "gptq, act order": {"algorithm": "gptq", "act_order": True},
        "gptq, first to last": {"algorithm": "gptq", "act_order": False},
    }
    for size in (32, 128):
        for symmetric in (True, False):
            words = f"groups of {size}, {'symmetric' if symmetric else 'asymmetric'}"
            found.append(("ONNX Runtime", words, partial(by_ort, source, target, size, symmetric)))
            for name, options in list(variants.items())[: None if symmetric else 3]:
                changes = {"group_size": size, "symmetric": symmetric, **options}
                work = partial(by_roundel, source, target, data, **changes)
                found.append(("Roundel", f"{words}, {name}", work))
    return found


if __name__ == "__main__":
    main()
