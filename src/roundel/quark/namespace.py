"""Names that scripts may import and Roundel does otherwise: using one says what to do instead."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NoReturn

from roundel.quark.errors import QuarkConfigError
from roundel.quark.specs import DATA_TYPES, KINDS, SPECS

_SEARCH = (
    "search of the first kind",
    "Use AutoSearchPro with get_auto_search_config, or `roundel search` over recipe fields.",
)
_CALIBRATOR = (
    "calibrating apart from a run",
    "Pass SaveAndRestore=FILE: ranges are then kept for the next run of the same model and data.",
)
ABSENT: dict[str, tuple[str, str]] = {
    "AutoSearch": _SEARCH,
    "AutoSearchConfig": _SEARCH,
    "SearchSpace": _SEARCH,
    "create_calibrator_float_scale": _CALIBRATOR,
    "create_calibrator_power_of_two": _CALIBRATOR,
}


class Absent:
    """Stands for a name; it can be imported, and explains itself when used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **options: Any) -> NoReturn:
        what, instead = ABSENT[self._name]
        raise QuarkConfigError(f"{self._name}: Roundel has no {what}.", hint=instead)

    def __repr__(self) -> str:
        return f"<{self._name}: not in Roundel>"


_OURS: Mapping[str, tuple[str, ...]] = {
    "enums": (
        *("CalibMethod", "ExtendedCalibrationMethod", "ExtendedQuantFormat", "ExtendedQuantType"),
        *("Int16Method", "LayerWiseMethod", "PowerOfTwoMethod", "QuantGranularity", "ScaleType"),
        *("VitisQuantFormat", "VitisQuantType", "get_tensor_type_from_qType"),
    ),
    "config": ("Config", "QuantizationConfig"),
    "presets": (
        *("DEFAULT_ADAQUANT_PARAMS", "DEFAULT_ADAROUND_PARAMS", "DEFAULT_BFP_PARAMS"),
        *("DEFAULT_MICROEXPONENTS_PARAMS", "DEFAULT_MICROSCALING_PARAMS"),
        *("get_default_config", "get_default_config_mapping"),
    ),
    "specs": ("AlgoConfig", "DataType", "QLayerConfig", "QTensorConfig", *KINDS, *DATA_TYPES, *SPECS),
    "qconfig": ("QConfig",),
    "quantizer": ("ModelQuantizer", "quantize_dynamic", "quantize_static"),
    "runtime": (
        *("CachedDataReader", "PathDataReader", "RandomDataReader", "get_data_reader"),
        *("ScreenLogger", "dump_model", "log_errors"),
        *("COP_BFP_OP_NAME", "COP_DEQUANT_OP_NAME", "COP_DOMAIN", "COP_IN_OP_NAME", "COP_LSTM_OP_NAME"),
        *("COP_MX_OP_NAME", "COP_QUANT_OP_NAME", "COP_VERSION"),
        *("create_infer_session_for_onnx_model", "get_library_path", "register_custom_ops_library"),
    ),
    "search": ("AutoSearchPro", "generate_all_configs", "get_auto_search_config"),
}
_RUNTIME: Mapping[str, tuple[str, ...]] = {
    "onnxruntime.quantization.calibrate": (
        *("CalibraterBase", "CalibrationDataReader", "CalibrationMethod", "MinMaxCalibrater"),
    ),
    "onnxruntime.quantization.quant_utils": (
        *("QuantFormat", "QuantType", "QuantizationMode", "write_calibration_table"),
    ),
}
HOMES: Mapping[str, str] = {
    **{name: f"roundel.quark.{home}" for home, names in _OURS.items() for name in names},
    **{name: home for home, names in _RUNTIME.items() for name in names},
}
_PRESETS, _QCONFIGS = "_CONFIG", "_QCONFIG"


def public_names() -> tuple[str, ...]:
    """What `from quark.onnx import *` brings."""
    from roundel.quark.qconfig import QCONFIG_NAMES

    return tuple(sorted({*HOMES, *ABSENT, *QCONFIG_NAMES, "_COP_DOMAIN", "_COP_VERSION"}))


def lookup(name: str) -> Any:
    """The object of that name.

    Presets come as fresh copies, so that no script changes another's.

    Raises:
        AttributeError: there is none.
    """
    if name in HOMES:
        return getattr(importlib.import_module(HOMES[name]), name)
    if name in ABSENT:
        return Absent(name)
    if name.startswith("_COP_"):
        return getattr(importlib.import_module("roundel.quark.runtime"), name[1:])
    made = _preset(name)
    if made is None:
        raise AttributeError(f"Roundel's quark API has no '{name}'")
    return made


def _preset(name: str) -> Any:
    if name == "DefaultConfigMapping":
        return lookup("get_default_config_mapping")()
    if name.endswith(_QCONFIGS):
        return importlib.import_module("roundel.quark.qconfig").qconfig_preset(name)
    if name.endswith(_PRESETS):
        return importlib.import_module("roundel.quark.presets").preset_constant(name)
    return None
