"""The custom-operator library that Roundel's models do not need.

Scripts register it all the same before they open a model. `get_library_path` therefore hands out the path of
a file that stands for "nothing to register", and importing this module teaches the process's `SessionOptions`
to take it for that. It must be the import: in `options.register_custom_ops_library(get_library_path())` the
method is looked up before `get_library_path` is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort

from roundel.quark.errors import QuarkConfigError, expected_names

COP_DOMAIN = "com.amd.quark"
COP_VERSION = 1
COP_QUANT_OP_NAME = "ExtendedQuantizeLinear"
COP_DEQUANT_OP_NAME = "ExtendedDequantizeLinear"
COP_IN_OP_NAME = "ExtendedInstanceNormalization"
COP_LSTM_OP_NAME = "ExtendedLSTM"
COP_BFP_OP_NAME = "BFPQuantizeDequantize"
COP_MX_OP_NAME = "MXQuantizeDequantize"

_MARKER = Path(__file__).with_name("no_custom_operators.txt")
_DEVICES = ("CPU", "CUDA", "GPU", "ROCM")


def get_library_path(device: str = "CPU", lib: str = "custom_ops") -> str:
    """A path that `SessionOptions.register_custom_ops_library` accepts.

    There is nothing to register: Roundel's models hold standard operators, or carry the definition of
    AMD's as model-local functions.

    Raises:
        QuarkConfigError: the device is none of those that scripts choose from.
    """
    if str(device).upper() not in _DEVICES:
        raise QuarkConfigError(
            "There is no such device.", observed=device, **expected_names(str(device), _DEVICES)
        )
    return str(_MARKER)


def register_custom_ops_library(session_options: ort.SessionOptions, device: str = "CPU") -> None:
    """Register what `get_library_path` names."""
    session_options.register_custom_ops_library(get_library_path(device))


def create_infer_session_for_onnx_model(
    model_input: str | Path | onnx.ModelProto,
    sess_options: ort.SessionOptions | None = None,
    providers: list[str] | None = None,
) -> ort.InferenceSession:
    """A plain ONNX Runtime session."""
    source = model_input.SerializeToString() if isinstance(model_input, onnx.ModelProto) else str(model_input)
    return ort.InferenceSession(source, sess_options, providers=providers or ["CPUExecutionProvider"])


def _accept_marker() -> None:
    """For this process: registering the marker does nothing, anything else is as before."""
    register = ort.SessionOptions.register_custom_ops_library

    def register_custom_ops_library(self: Any, path: Any) -> None:
        if not _is_marker(path):
            register(self, path)

    register_custom_ops_library.__doc__ = register.__doc__
    ort.SessionOptions.register_custom_ops_library = register_custom_ops_library


def _is_marker(path: Any) -> bool:
    try:
        return Path(path).samefile(_MARKER)
    except (OSError, TypeError, ValueError):  # no path, or no such file: ONNX Runtime says so better
        return False


_accept_marker()
