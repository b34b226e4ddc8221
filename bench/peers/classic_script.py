"""A script as the documents have it: quantizes one model with several presets.

Runs unchanged in AMD Quark's environment, and in Roundel's with `python -m roundel.quark classic_script.py`.
The arguments are the model, a folder for the results, the number of random samples, and preset names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnxruntime.quantization.calibrate import CalibrationDataReader
from quark.onnx import ModelQuantizer  # type: ignore[import-not-found]
from quark.onnx.quantization.config import Config, get_default_config  # type: ignore[import-not-found]


class RandomImages(CalibrationDataReader):  # type: ignore[misc]
    """Gaussian samples of the model's input shape, the same in every run."""

    def __init__(self, model: str, count: int) -> None:
        given = onnx.load(model, load_external_data=False).graph.input[0]
        shape = [d.dim_value or 1 for d in given.type.tensor_type.shape.dim]
        generator = np.random.default_rng(0)
        samples = [{given.name: generator.normal(0, 1, shape).astype(np.float32)} for _ in range(count)]
        self._left: Iterator[dict[str, Any]] = iter(samples)

    def get_next(self) -> dict[str, Any] | None:
        """The next sample; None at the end."""
        return next(self._left, None)


def main() -> None:
    """Quantize once for each preset."""
    model, folder, count, *presets = sys.argv[1:]
    for preset in presets:
        config = Config(global_quant_config=get_default_config(preset))
        target = Path(folder) / f"{preset}.onnx"
        ModelQuantizer(config).quantize_model(model, str(target), RandomImages(model, int(count)))


if __name__ == "__main__":
    main()
