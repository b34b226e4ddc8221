"""Options about element types, symmetry, scales and biases."""

from __future__ import annotations

from typing import Any

from roundel.quark.enums import CalibrationMethod, ExtendedCalibrationMethod, PowerOfTwoMethod
from roundel.quark.request import OPTIONS as BLOCK_OPTIONS
from roundel.quark.request import Request, block_values
from roundel.quark.rows import (
    ANY,
    COUNT,
    INTEGER,
    NUMBER,
    NUMBER_LIST,
    PATH,
    SWITCH,
    TABLE,
    TEXTS,
    Effect,
    Kind,
    Option,
    Work,
    always,
    computed,
    refusal,
    refused_option,
    switched,
    to_field,
    to_run,
    to_word,
)

_SCALES = ("activations.scale", "weights.scale")


def _bias(value: Any, request: Request) -> Effect:
    """QuantizeBias, Int16Bias and Int32Bias together say how biases are stored."""
    if not request.asked("QuantizeBias", True):
        return Effect(recipe={"bias.type": "float"})
    if not (request.integer_activations and request.integer_weights):
        return Effect(recipe={"bias.type": "weights"})
    if request.asked("Int16Bias"):
        return Effect(recipe={"bias.type": "int16"})
    if request.asked("Int32Bias", not request.npu):
        return Effect(recipe={"bias.type": "int32"})
    return Effect(recipe={"bias.type": "int8" if request.weight == "int8" else "weights"})


def _power_of_two(value: Any, request: Request) -> Effect:
    """False asks for float scales where the method is one of power-of-two scales."""
    if value or request.scale != "power_of_two":
        return Effect()
    if request.npu:
        why = "the NPU's 8-bit engine shifts instead of multiplying."
        raise refusal("UsePowerOf2Scale", value, why, "Use the preset A8W8 for float scales.")
    return Effect(recipe=dict.fromkeys(_SCALES, "float"))


def _form(value: Any, request: Request) -> Effect:
    if request.asked("EnableVaimlBF16"):
        return Effect(recipe={"floats.form": "plain"})
    return Effect(recipe={"floats.form": "cast" if request.casts else "pair"})


def _blocks(option: str) -> Option:
    """The element type follows from the same attributes; see `block_type`."""

    def work(value: Any, request: Request) -> Effect:
        return Effect(recipe=dict(block_values(option, value)))

    return computed(option, {}, TABLE, "activations.type, weights.type, blocks.*", work)


def _scaled(side: str) -> Work:
    def work(value: Any, request: Request) -> Effect:
        return Effect(recipe={f"{side}.scaled": value} if request.short_floats else {})

    return work


NUMBERS: tuple[Option, ...] = (
    to_field("ActivationSymmetric", False, SWITCH, "activations.symmetric"),
    to_field("WeightSymmetric", True, SWITCH, "weights.symmetric"),
    computed("QuantizeBias", True, SWITCH, "bias.type", _bias),
    computed("Int32Bias", True, SWITCH, "bias.type", _bias),
    computed("Int16Bias", False, SWITCH, "bias.type", _bias),
    always(
        "AdjustBiasScale",
        True,
        SWITCH,
        "a bias of 16 or 32 bits has the step of its layer's products.",
        refuse=(False,),
    ),
    always(
        "AdjustWeightScaleForInt32Bias",
        False,
        SWITCH,
        "a weight's scale grows where its bias would not fit into 32 bits.",
    ),
    switched("Int16Scale", False, ", ".join(_SCALES), dict.fromkeys(_SCALES, "int16")),
    computed("UsePowerOf2Scale", True, SWITCH, "activations.scale, weights.scale", _power_of_two),
    refused_option(
        "UseUnsignedReLU",
        False,
        "it belongs to the QOperator format.",
        "Use activation_type=QuantType.QUInt8.",
        SWITCH,
    ),
    refused_option(
        "QuantizeFP16",
        False,
        "float16 models become float32 models first, value by value, and are quantized then.",
        "Leave it out; for a float16 result use the preset FP16 or `roundel convert`.",
        SWITCH,
    ),
    always("UseFP32Scale", False, SWITCH, "scales are float32."),
    computed("WeightScaled", False, SWITCH, "weights.scaled", _scaled("weights")),
    computed("ActivationScaled", False, SWITCH, "activations.scaled", _scaled("activations")),
    computed("BF16QDQToCast", False, SWITCH, "floats.form", _form),
    computed("EnableVaimlBF16", False, SWITCH, "floats.form", _form),
    to_field("BF16WithClip", False, SWITCH, "floats.clip"),
    *map(_blocks, BLOCK_OPTIONS),
    to_field("RefineBlockAxis", True, SWITCH, "blocks.refine_axis"),
)


_FINEST = 4096  # bins on each side of zero
_WEIGHT_METHODS = {
    CalibrationMethod.MinMax: "minmax",
    PowerOfTwoMethod.NonOverflow: "minmax",
    PowerOfTwoMethod.MinMSE: "mse",
    ExtendedCalibrationMethod.MinMSE: "mse",
}


def _moving_average(value: Any, request: Request) -> Effect:
    """The mean over samples, or an exponential average where a constant is given."""
    if not request.asked("CalibMovingAverage"):
        return Effect()
    constant = request.options.get("CalibMovingAverageConstant")
    return Effect(recipe={"calibration.moving_average": "mean" if constant is None else constant})


def _bins(value: Any, request: Request) -> Effect:
    if value > 2 * _FINEST:
        why = f"histograms have {2 * _FINEST} bins, aligned to powers of two."
        raise refusal("NumBins", value, why, f"Ask for at most {2 * _FINEST}.")
    return Effect(note=f"NumBins: histograms always have {2 * _FINEST} bins, at least as fine as asked for")


def _weight_method(value: Any, request: Request) -> Effect:
    if value not in _WEIGHT_METHODS:
        why = "a weight's range is its extremes, or the one with the least error."
        raise refusal("WeightCalibrateMethod", value, why, "Use MinMax or MinMSE.")
    return Effect(recipe={"weights.method": _WEIGHT_METHODS[value]})


def _random(value: Any, request: Request) -> Effect:
    return Effect(run={"random": value})


CALIBRATION: tuple[Option, ...] = (
    to_field("CalibDataSize", None, COUNT, "data.samples"),
    to_field("CalibTensorRangeSymmetric", None, SWITCH, "calibration.symmetric_range"),
    computed("CalibMovingAverage", False, SWITCH, "calibration.moving_average", _moving_average),
    computed("CalibMovingAverageConstant", None, NUMBER, "calibration.moving_average", _moving_average),
    computed("NumBins", None, INTEGER, "nothing, up to 8192; refused above", _bins),
    refused_option(
        "NumQuantizedBins",
        128,
        "the entropy search has as many levels as the type.",
        "Leave it at 128.",
        INTEGER,
    ),
    to_field("Percentile", 99.999, NUMBER, "calibration.percentile"),
    to_word("Scenario", "same", "calibration.scenario", {"same": "same", "p3": "p3"}),
    to_word("LWPMetric", "mae", "calibration.metric", {"mae": "mae", "mse": "mse"}),
    to_field("PercentileCandidates", None, NUMBER_LIST, "calibration.candidates"),
    always("LWPUseHistogram", True, SWITCH, "ranges come from histograms.", refuse=(False,)),
    *(
        to_word(
            key,
            "All",
            "calibration.mode",
            {"All": "all", "MostCommon": "most_common", "Percentile": "percentile"},
        )
        for key in ("MinMSEModePof2Scale", "MinMSEMode")
    ),
    computed("WeightCalibrateMethod", None, ANY, "weights.method", _weight_method),
    always("MinMSEModeFloatScale", None, ANY, "a weight's range is searched over all its values."),
    always("CalibOptimizeMem", True, SWITCH, "calibration holds one batch at a time and uses no disk."),
    always("CalibWorkerNum", 1, COUNT, "calibration uses the cores that there are."),
    refused_option(
        "CalibPassthroughOpTypes",
        [],
        "operators that only move values share their input's scale by themselves.",
        "Exclude an operator with nodes_to_exclude, or give its tensors a range with TensorQuantOverrides.",
        TEXTS,
    ),
    refused_option(
        "SaveTensorHistFig",
        False,
        "a run writes the model and its record, no pictures.",
        "Run `roundel tools save_tensor_hist --input_model MODEL --data_path FOLDER`.",
        SWITCH,
    ),
    to_run("SaveAndRestore", None, PATH, "statistics"),
    to_run("TensorsRangeFile", None, PATH, "statistics"),
    computed("UseRandomData", False, SWITCH, "random samples where no reader is given", _random),
    to_run("RandomDataReaderInputShape", {}, TABLE, "random_shapes"),
    to_run("RandomDataReaderInputDataRange", None, TABLE, "random_ranges"),
)


_PREFERENCES = ("accuracy", "speed", "resource_efficiency")
_PREFERENCE = Kind(" or ".join(map(repr, _PREFERENCES)), lambda v: v in _PREFERENCES)


def _preference(value: Any, request: Request) -> Effect:
    tune = "improve.finetune."
    words: dict[str, dict[str, Any]] = {
        "accuracy": {
            "calibration.mode": "all",
            f"{tune}early_stop": False,
            f"{tune}update_bias": True,
        },
        "speed": {"improve.rounding": False, f"{tune}early_stop": True},
        "resource_efficiency": {"improve.samples": 32},
    }
    return Effect(recipe=words[value])


PREFERENCE: tuple[Option, ...] = (
    computed("QuantizationPreference", None, _PREFERENCE, "improve.*, calibration.mode", _preference),
)
