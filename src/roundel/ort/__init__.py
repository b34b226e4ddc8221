"""ONNX Runtime's quantizer: the same calls, Roundel's scales and rounding.

    from roundel.ort import CalibrationDataReader, QuantType, quantize_static
    quantize_static("in.onnx", "out.onnx", reader, activation_type=QuantType.QUInt16)

Scripts written for `onnxruntime.quantization` run as they are with `python -m roundel.ort script.py`. What is
not about choosing numbers (readers, types, configs, pre-processing, debugging) is ONNX Runtime's own.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

OURS = {
    "quantize": "roundel.ort.quantizer",
    "quantize_dynamic": "roundel.ort.quantizer",
    "quantize_static": "roundel.ort.quantizer",
    "install": "roundel.ort.running",
    "uninstall": "roundel.ort.running",
}


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__all__":
        raise AttributeError(name)
    if name == "__all__":
        return __dir__()
    if name in OURS:
        return getattr(import_module(OURS[name]), name)
    try:
        return getattr(import_module("onnxruntime.quantization"), name)
    except AttributeError:
        raise AttributeError(f"onnxruntime.quantization has no '{name}'") from None


def __dir__() -> list[str]:
    theirs = vars(import_module("onnxruntime.quantization"))
    return sorted({*OURS, *(name for name in theirs if not name.startswith("_"))})
