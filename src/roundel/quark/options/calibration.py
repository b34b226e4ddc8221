"""Options about calibration and its data."""

from __future__ import annotations

from typing import Any

from roundel.quark.enums import CalibrationMethod, ExtendedCalibrationMethod, PowerOfTwoMethod
from roundel.quark.request import Request
from roundel.quark.rows import (
    ANY,
    COUNT,
    INTEGER,
    NUMBER,
    NUMBERS,
    PATH,
    SWITCH,
    TABLE,
    TEXTS,
    Effect,
    Option,
    always,
    computed,
    refusal,
    refused,
    to_field,
    to_run,
    to_word,
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
    refused(
        "NumQuantizedBins",
        128,
        "the entropy search has as many levels as the type.",
        "Leave it at 128.",
        INTEGER,
    ),
    to_field("Percentile", 99.999, NUMBER, "calibration.percentile"),
    to_word("Scenario", "same", "calibration.scenario", {"same": "same", "p3": "p3"}),
    to_word("LWPMetric", "mae", "calibration.metric", {"mae": "mae", "mse": "mse"}),
    to_field("PercentileCandidates", None, NUMBERS, "calibration.candidates"),
    always("LWPUseHistogram", True, SWITCH, "ranges come from histograms.", refuse=(False,)),
    to_word(
        "MinMSEModePof2Scale",
        "All",
        "calibration.mode",
        {"All": "all", "MostCommon": "most_common", "Percentile": "percentile"},
    ),
    to_word(
        "MinMSEMode",
        "All",
        "calibration.mode",
        {"All": "all", "MostCommon": "most_common", "Percentile": "percentile"},
    ),
    computed("WeightCalibrateMethod", None, ANY, "weights.method", _weight_method),
    always("MinMSEModeFloatScale", None, ANY, "a weight's range is searched over all its values."),
    always("CalibOptimizeMem", True, SWITCH, "calibration holds one batch at a time and uses no disk."),
    always("CalibWorkerNum", 1, COUNT, "calibration uses the cores that there are."),
    refused(
        "CalibPassthroughOpTypes",
        [],
        "operators that only move values share their input's scale by themselves.",
        "Exclude an operator with nodes_to_exclude, or give its tensors a range with TensorQuantOverrides.",
        TEXTS,
    ),
    refused(
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
