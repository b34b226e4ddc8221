"""ONNX Runtime's own static quantizer (run in the ``ort`` environment).

Presets are the rows of :data:`PRESETS`, all with MinMax ranges and Q/DQ output. Option: ``preprocess`` (bool,
default false) runs ``quant_pre_process`` (shape inference, graph optimisation) first, inside the clock.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from protocol import Job, Quantize, Sample, parse_job, run_job

PACKAGES = ("onnxruntime", "onnx", "numpy")


@dataclass(frozen=True, slots=True)
class OrtPreset:
    """Settings of ``quantize_static``; the type is a name of ``QuantType``, weights are always int8."""

    activation: str
    symmetric: bool
    per_channel: bool


PRESETS = {
    "int8_tensor": OrtPreset(activation="QInt8", symmetric=True, per_channel=False),
    "int8_channel": OrtPreset(activation="QInt8", symmetric=True, per_channel=True),
    "uint8_channel": OrtPreset(activation="QUInt8", symmetric=False, per_channel=True),
    "int16_channel": OrtPreset(activation="QInt16", symmetric=True, per_channel=True),
}


def load(job: Job) -> Quantize:
    """Imports ONNX Runtime's quantizer and returns the call that quantizes."""
    from onnxruntime.quantization import (
        CalibrationDataReader,
        CalibrationMethod,
        QuantFormat,
        QuantType,
        quantize_static,
    )
    from onnxruntime.quantization.shape_inference import quant_pre_process

    job.check_options(("preprocess",))
    if job.preset not in PRESETS:
        raise ValueError(f"unknown preset {job.preset!r}; this peer knows {sorted(PRESETS)}")
    preset = PRESETS[job.preset]

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        """Hands out the samples one by one, then None."""

        def __init__(self, samples: list[Sample]) -> None:
            self._left: Iterator[Sample] = iter(samples)

        def get_next(self) -> Sample | None:
            return next(self._left, None)

    def quantize(samples: list[Sample]) -> None:
        with tempfile.TemporaryDirectory(prefix="roundel-bench-") as folder:
            source = job.model
            if job.options.get("preprocess", False):
                source = Path(folder) / "preprocessed.onnx"
                quant_pre_process(str(job.model), str(source))
            quantize_static(
                str(source),
                str(job.output),
                Reader(samples),
                quant_format=QuantFormat.QDQ,
                per_channel=preset.per_channel,
                activation_type=QuantType[preset.activation],
                weight_type=QuantType.QInt8,
                calibrate_method=CalibrationMethod.MinMax,
                extra_options={"ActivationSymmetric": preset.symmetric, "WeightSymmetric": True},
            )

    return quantize


def main() -> None:
    """Runs the job given on the command line."""
    run_job(parse_job(), load, PACKAGES)


if __name__ == "__main__":
    main()
