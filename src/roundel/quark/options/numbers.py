"""Options about element types, symmetry, scales and biases."""

from __future__ import annotations

from typing import Any

from roundel.quark.enums import CalibrationMethod, ExtendedCalibrationMethod, PowerOfTwoMethod
from roundel.quark.kinds import COUNT, INTEGER, NUMBER, NUMBERS, PATH, SWITCH, TABLE, one_of
from roundel.quark.request import OPTIONS as BLOCK_OPTIONS
from roundel.quark.request import Request, block_values
from roundel.quark.rows import (
    Effect,
    Option,
    computed,
    noted,
    refused,
    switched,
    to_field,
    to_run,
    unsupported,
)

_SCALES = ("activations.scale", "weights.scale")


def _bias(value: bool, request: Request) -> str:
    """QuantizeBias, Int16Bias and Int32Bias together say how biases are stored."""
    if not request.asked("QuantizeBias", True):
        return "float"
    if not (request.integer_activations and request.integer_weights):
        return "weights"
    if request.asked("Int16Bias"):
        return "int16"
    if request.asked("Int32Bias", not request.npu):
        return "int32"
    return "int8" if request.weight == "int8" else "weights"


def _power_of_two(value: bool, request: Request) -> Effect:
    """False asks for float scales where the method is one of power-of-two scales."""
    if value or request.scale != "power_of_two":
        return Effect()
    if request.npu:
        why = "the NPU's 8-bit engine shifts instead of multiplying."
        raise unsupported("UsePowerOf2Scale", value, why, "Use the preset A8W8 for float scales.")
    return Effect(recipe=dict.fromkeys(_SCALES, "float"))


def _form(value: bool, request: Request) -> str:
    if request.asked("EnableVaimlBF16"):
        return "plain"
    return "cast" if request.casts else "pair"


def _scaled(value: bool, request: Request) -> bool | None:
    return value if request.short_floats else None


def _blocks(option: str) -> Option:
    """The element type follows from the same attributes; see `block_type`."""

    def work(value: Any, request: Request) -> Effect:
        return Effect(recipe=dict(block_values(option, value)))

    return computed(option, {}, "activations.type, weights.type, blocks.*", work)


_BIAS_STEP = "a bias of 16 or 32 bits has the step of its layer's products."
_FP16 = (
    "float16 models become float32 models first, value by value, and are quantized then.",
    "Leave it out; for a float16 result use the preset FP16 or `roundel convert`.",
)

NUMERIC = (
    to_field("ActivationSymmetric", False, "activations.symmetric"),
    to_field("WeightSymmetric", True, "weights.symmetric"),
    to_field("QuantizeBias", True, "bias.type", to=_bias),
    to_field("Int32Bias", True, "bias.type", to=_bias),
    to_field("Int16Bias", False, "bias.type", to=_bias),
    noted("AdjustBiasScale", True, _BIAS_STEP, refuse=False),
    noted("AdjustWeightScaleForInt32Bias", False, "a weight's scale grows where its bias would not fit."),
    switched("Int16Scale", False, ", ".join(_SCALES), dict.fromkeys(_SCALES, "int16")),
    computed("UsePowerOf2Scale", True, ", ".join(_SCALES), _power_of_two),
    refused(
        "UseUnsignedReLU", False, "it is of the QOperator format.", "Use activation_type=QuantType.QUInt8."
    ),
    refused("QuantizeFP16", False, *_FP16),
    noted("UseFP32Scale", False, "scales are float32."),
    to_field("WeightScaled", False, "weights.scaled", to=_scaled),
    to_field("ActivationScaled", False, "activations.scaled", to=_scaled),
    to_field("BF16QDQToCast", False, "floats.form", to=_form),
    to_field("EnableVaimlBF16", False, "floats.form", to=_form),
    to_field("BF16WithClip", False, "floats.clip"),
    *map(_blocks, BLOCK_OPTIONS),
    to_field("RefineBlockAxis", True, "blocks.refine_axis"),
)

_FINEST = 4096  # bins on each side of zero
_WEIGHT_METHODS = {
    CalibrationMethod.MinMax: "minmax",
    PowerOfTwoMethod.NonOverflow: "minmax",
    PowerOfTwoMethod.MinMSE: "mse",
    ExtendedCalibrationMethod.MinMSE: "mse",
}
_MODES = {"All": "all", "MostCommon": "most_common", "Percentile": "percentile"}


def _moving_average(value: Any, request: Request) -> Any:
    """The mean over samples, or an exponential average where a constant is given."""
    if not request.asked("CalibMovingAverage"):
        return None
    return request.asked("CalibMovingAverageConstant", "mean")


def _bins(value: int, request: Request) -> Effect:
    if value > 2 * _FINEST:
        why = f"histograms have {2 * _FINEST} bins, aligned to powers of two."
        raise unsupported("NumBins", value, why, f"Ask for at most {2 * _FINEST}.")
    return Effect(note=f"NumBins: histograms always have {2 * _FINEST} bins, at least as fine as asked for")


def _weight_method(value: Any, request: Request) -> str:
    if value not in _WEIGHT_METHODS:
        why = "a weight's range is its extremes, or the one with the least error."
        raise unsupported("WeightCalibrateMethod", value, why, "Use MinMax or MinMSE.")
    return _WEIGHT_METHODS[value]


def _mode(value: str, request: Request) -> str:
    return _MODES[value]


_SHARED = (
    "operators that only move values share their input's scale.",
    "Use nodes_to_exclude, or give its tensors a range with TensorQuantOverrides.",
)
_NO_PICTURES = (
    "a run writes the model and its record, no pictures.",
    "Run `roundel tools save_tensor_hist --input_model MODEL --data_path FOLDER`.",
)

CALIBRATION = (
    to_field("CalibDataSize", None, "data.samples", COUNT),
    to_field("CalibTensorRangeSymmetric", None, "calibration.symmetric_range", SWITCH),
    to_field("CalibMovingAverage", False, "calibration.moving_average", to=_moving_average),
    to_field("CalibMovingAverageConstant", None, "calibration.moving_average", NUMBER, to=_moving_average),
    computed("NumBins", None, "nothing, up to 8192; refused above", _bins, INTEGER),
    refused("NumQuantizedBins", 128, "entropy has as many levels as the type.", "Leave it at 128."),
    to_field("Percentile", 99.999, "calibration.percentile"),
    to_field("Scenario", "same", "calibration.scenario", one_of("same", "p3")),
    to_field("LWPMetric", "mae", "calibration.metric", one_of("mae", "mse")),
    to_field("PercentileCandidates", None, "calibration.candidates", NUMBERS),
    noted("LWPUseHistogram", True, "ranges come from histograms.", refuse=False),
    to_field("MinMSEModePof2Scale", "All", "calibration.mode", one_of(*_MODES), to=_mode),
    to_field("MinMSEMode", "All", "calibration.mode", one_of(*_MODES), to=_mode),
    to_field("WeightCalibrateMethod", None, "weights.method", to=_weight_method),
    noted("MinMSEModeFloatScale", None, "a weight's range is searched over all its values."),
    noted("CalibOptimizeMem", True, "calibration holds one batch at a time and uses no disk."),
    noted("CalibWorkerNum", 1, "calibration uses the cores that there are."),
    refused("CalibPassthroughOpTypes", [], *_SHARED),
    refused("SaveTensorHistFig", False, *_NO_PICTURES),
    to_run("SaveAndRestore", None, "statistics", PATH),
    to_run("TensorsRangeFile", None, "statistics", PATH),
    to_run("UseRandomData", False, "random_data"),
    to_run("RandomDataReaderInputShape", {}, "random_shapes"),
    to_run("RandomDataReaderInputDataRange", None, "random_ranges", TABLE),
)

_PREFERENCES: dict[str, dict[str, Any]] = {
    "accuracy": {
        "calibration.mode": "all",
        "improve.finetune.early_stop": False,
        "improve.finetune.update_bias": True,
    },
    "speed": {"improve.rounding": False, "improve.finetune.early_stop": True},
    "resource_efficiency": {"improve.samples": 32},
}


def _preference(value: str, request: Request) -> Effect:
    return Effect(recipe=_PREFERENCES[value])


PREFERENCE = (
    computed(
        "QuantizationPreference", None, "improve.*, calibration.mode", _preference, one_of(*_PREFERENCES)
    ),
)
