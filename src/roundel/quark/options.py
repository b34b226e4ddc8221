"""Options about the float graph, Q/DQ pairs, calibration, types and scales, the engine, and the run."""

from __future__ import annotations

import re
from typing import Any

from roundel.quark import rows
from roundel.quark.config import classic_key
from roundel.quark.enums import CalibrationMethod, ExtendedCalibrationMethod, PowerOfTwoMethod
from roundel.quark.errors import QuarkConfigError
from roundel.quark.request import ALIGNED, BLOCK_OPTIONS, LIMITS, Request, block_values
from roundel.quark.rows import Effect, computed, noted, refused, switched, to_field, to_run, unsupported
from roundel.quark.selection import from_mixed_precision, from_tensor_overrides
from roundel.recipe.settings import Prepare

_LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm"})


def _unshare_weights(value: list[str], request: Request) -> bool:
    """A list of operator types whose weights are copied; an empty one means all of them."""
    others = sorted(set(value) - _LAYERS)
    if others:
        why = f"weights are copied for {', '.join(sorted(_LAYERS))} only."
        raise unsupported("CopySharedInit", value, why, f"Leave out {', '.join(others)}.")
    return True


_OPSETS = 17, 21  # the oldest that files are written at, and the newest that a model is raised to


def _opset(value: int, request: Request) -> Effect:
    lowest, highest = _OPSETS
    taken = min(max(value, lowest), highest)
    note = f"ConvertOpsetVersion: {taken} instead of {value}; a newer model keeps its opset"
    return Effect(recipe={"output.opset": taken}, note=None if taken == value else note)


_SHAPE = re.compile(r"\s*(?P<name>.+?)\s*:\s*\[(?P<sizes>[\d\s,.]+)\]\s*")


def shapes(text: str) -> dict[str, tuple[int, ...]]:
    """'input_1:[1,3,224,224];input_2:[1,96]' by name.

    Raises:
        ValueError: the text has another form.
    """
    found = {}
    for part in filter(str.strip, text.split(";")):
        match = _SHAPE.fullmatch(part)
        if match is None:
            raise ValueError(part)
        sizes = [size for size in re.split(r"[,.]", match["sizes"]) if size.strip()]
        found[match["name"]] = tuple(int(size) for size in sizes)
    return found


def _fixed_shapes(text: str, request: Request) -> dict[str, tuple[int, ...]]:
    try:
        return shapes(text)
    except ValueError as error:
        raise QuarkConfigError(
            "A fixed shape cannot be read.",
            where="extra_options['FixShapes']",
            observed=error,
            expected="name:[1,3,224,224]",
        ) from error


_YAML = (
    "its passes are a program of their own, in files of their own format.",
    "Use the options ConvertOpsetVersion, FoldBatchNorm, Fuse…, Convert…, or a Roundel recipe.",
)
_NO_PASS = {f"prepare.{name}": False for name, row in Prepare.model_fields.items() if row.annotation is bool}

GRAPH = (
    refused("ShapeShifterYaml", None, *_YAML),
    refused("PreprocessYAML", None, *_YAML),
    to_field("SimplifyModel", True, "prepare.fold_constants"),
    refused("SimplifyModelOptions", {}, "they belong to another simplifier.", "Use SimplifyModel alone."),
    computed("ConvertOpsetVersion", None, "output.opset", _opset, rows.INTEGER),
    noted("RemoveInputInit", True, "a weight is never an input, which could replace it."),
    to_field("CopySharedInit", None, "prepare.unshare_weights", rows.TEXTS, to=_unshare_weights),
    to_field(
        "CopyBiasInit",
        sorted(_LAYERS),
        "prepare.unshare_biases",
        rows.TEXTS_OR_NONE,
        to=lambda value, _: bool(value),
    ),
    to_field("FoldBatchNorm", True, "prepare.fold_batch_norm"),
    to_field("FuseInstanceNorm", True, "prepare.fuse_instance_norm"),
    to_field("FuseL2Norm", True, "prepare.fuse_l2_norm"),
    to_field("FuseGelu", True, "prepare.fuse_gelu"),
    to_field("FuseLayerNorm", True, "prepare.fuse_layer_norm"),
    to_field("ConvertSplitToSlice", False, "prepare.split_to_slice"),
    to_field("ConvertBNToConv", False, "prepare.batch_norm_to_conv"),
    to_field("ConvertReduceMeanToGlobalAvgPool", False, "prepare.reduce_mean_to_global_average_pool"),
    to_field("SplitLargeKernelPool", False, "prepare.split_large_pools"),
    to_field("ReplaceClip6Relu", False, "npu.clip_to_relu"),
    to_field("ConvertClipToRelu", False, "npu.clip_to_relu"),
    to_field("FixShapes", None, "prepare.fixed_shapes", rows.TEXT, to=_fixed_shapes),
    switched("SkipPreprocess", False, "prepare.* (every pass off)", _NO_PASS),
)

_KEPT = {f"RemoveQDQConv{op}": op for op in ("Clip", "Relu", "LeakyRelu", "PRelu")}
_BEFORE_GELU = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Add")
_AFTER_NORM = ("Relu", "LeakyRelu", "PRelu", "Clip")
_BETWEEN = "placement.no_pair_between"
_BY_TENSOR = "Set types with TensorQuantOverrides."


def _keep_before(value: Any, request: Request) -> tuple[str, ...]:
    return tuple(op for key, op in _KEPT.items() if not request.asked(key, True))


def _left_out(value: Any, request: Request) -> tuple[tuple[str, str], ...]:
    """All pairs of operators between which a Q/DQ pair is to be left out."""
    found: list[tuple[str, str]] = []
    if request.asked("RemoveQDQConvGelu"):
        found += [(op, "Gelu") for op in _BEFORE_GELU]
    if request.asked("RemoveQDQInstanceNorm"):
        found += [("InstanceNormalization", op) for op in _AFTER_NORM]
    if request.asked("RemoveQDQMulAdd"):
        found.append(("Mul", "Add"))
    found += [(str(up), str(down)) for up, down in request.asked("RemoveQDQBetweenOps", ())]
    return tuple(found)


def _fused(value: bool, request: Request) -> bool | None:
    """Integers and short floats are always fused; block formats when told to."""
    return value if request.block_activations else None


def _float_weights(value: Any, request: Request) -> Effect:
    """Float weights behind a Q/DQ pair: what short floats and blocks have anyhow, and integers never."""
    if not value or not request.integer_weights:
        return rows.NOTHING
    why = "integer weights are stored as integers, a quarter of the size."
    raise unsupported("AddQDQPairToWeight", value, why, "Leave the option out: the model computes the same.")


BETWEEN = (
    computed("AddQDQPairToWeight", False, "nothing; refused for integers", _float_weights),
    to_field("ForceQuantizeNoInputCheck", False, "placement.quantize_passthrough_inputs"),
    to_field("DedicatedQDQPair", False, "placement.dedicated_pairs"),
    to_field("DedicateDQNode", False, "placement.dedicated_dequantizers"),
    refused("EnableDualQuantNodePairs", False, "a tensor has its maker's type.", _BY_TENSOR),
    to_field("OpTypesToExcludeOutputQuantization", [], "placement.skip_output_op_types"),
    to_run("NodesToExcludeOutputQuantization", [], "float_outputs_of"),
    refused(
        "QDQOpTypePerChannelSupportToAxis", {}, "the axis follows from the operator.", "Use per_channel=True."
    ),
    noted("UseQDQVitisCustomOps", True, "operators of no library are needed; types and format decide."),
    switched("UseQDQContribOps", False, "placement.domain", {"placement.domain": "com.microsoft"}),
    *(to_field(key, True, "placement.keep_pair_before", to=_keep_before) for key in _KEPT),
    to_field("RemoveQDQConvGelu", False, _BETWEEN, to=_left_out),
    to_field("RemoveQDQInstanceNorm", False, _BETWEEN, to=_left_out),
    to_field("RemoveFusedQDQ", False, "placement.fuse_activations", to=_fused),
    to_field("RemoveQDQMulAdd", False, _BETWEEN, to=_left_out),
    to_field("RemoveQDQBetweenOps", None, _BETWEEN, rows.PAIRS, to=_left_out),
    to_field("FoldRelu", False, "placement.fold_relu"),
)

_SIMULATED = {
    "ConvertLeakyReluToDPUVersion": "leaky_relu",
    "ConvertSigmoidToHardSigmoid": "sigmoid_to_hard_sigmoid",
    "ConvertHardSigmoidToDPUVersion": "hard_sigmoid",
    "ConvertAvgPoolToDPUVersion": "average_pool",
    "ConvertReduceMeanToDPUVersion": "reduce_mean",
    "ConvertSoftmaxToDPUVersion": "softmax",
    "ConvertInstanceNormToDPUVersion": "instance_norm",
    "ConvertClipToDPUVersion": "clip",
}
_NO_ARITHMETIC = {f"npu.{name}": False for name in _SIMULATED.values()}
_NO_LIMITS = {f"npu.{name}": False for name in LIMITS}

ENGINE = (
    *(to_field(key, False, f"npu.{name}") for key, name in _SIMULATED.items()),
    *(to_field(classic_key(name), False, f"npu.{name}") for name in LIMITS),
    *(to_field(classic_key(name), False, f"placement.{name}") for name in ALIGNED),
    noted("AlignTranspose", False, "Transpose keeps its input's scale."),
    noted("AlignReshape", False, "Reshape keeps its input's scale."),
    # The two switches for all of them come last: they win.
    switched("SimulateDPU", True, "npu.* (all arithmetic off)", _NO_ARITHMETIC),
    switched("NPULimitationCheck", True, "npu.adjust_* (all limits off)", _NO_LIMITS),
    noted("MaxLoopNum", 5, "limits are met by solving for them, not by repeating."),
)


def _mixed(value: Any, request: Request) -> Effect:
    if not request.config.specific_tensor_precision:
        return Effect(note="MixedPrecisionTensor counts only with specific_tensor_precision=True")
    return Effect(recipe={"overrides": from_mixed_precision(value)})


TARGETS = (
    to_field("QuantizeAllOpTypes", False, "selection.all_op_types"),
    to_field("WeightsOnly", False, "placement.weights_only"),
    to_field("MatMulConstBOnly", False, "placement.matmul_const_only"),
    refused("EnableSubgraph", False, "the bodies of If, Loop and Scan stay float.", "Inline them before."),
    computed("MixedPrecisionTensor", {}, "overrides", _mixed),
    to_field("TensorQuantOverrides", {}, "overrides", to=from_tensor_overrides),
    refused("NodesWithMixedPrecision", {}, "it is internal to Quark.", "Use TensorQuantOverrides."),
    to_field("AlignEltwiseQuantType", False, "placement.constants_as_activations"),
)

_STOCK = "models run in a stock ONNX Runtime."
_CLEAR = "files are written in the clear."

RUN = (
    to_run("TmpDir", None, "temporary_folder", rows.PATH),
    refused("UserCustomOpLibPath", None, _STOCK, "Name nodes of other domains in nodes_to_exclude."),
    to_run("EvalMetrics", None, "evaluate"),
    to_run("EvalDataReader", None, "evaluation_data"),
    noted("FillAllValueInfo", False, "every tensor's type and shape are in the file."),
    refused("EncryptionAlgorithm", None, _CLEAR, "Encrypt the file, or use the provider's encryption_key."),
    to_run("Recipe", {}, "recipe_changes", rows.ANY),
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
        return rows.NOTHING
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


def _blocks(option: str) -> rows.Option:
    """The element type follows from the same attributes; see `block_type`."""
    becomes = "activations.type, weights.type, blocks.*"
    return computed(option, {}, becomes, lambda value, _: Effect(recipe=dict(block_values(option, value))))


_BIAS_STEP = "a bias of 16 or 32 bits has the step of its layer's products."
_FP16 = "float16 models become float32 models first, value by value, inputs and outputs included."

NUMERIC = (
    to_field("ActivationSymmetric", False, "activations.symmetric"),
    to_field("WeightSymmetric", True, "weights.symmetric"),
    to_field("QuantizeBias", True, "bias.type", to=_bias),
    to_field("Int32Bias", True, "bias.type", to=_bias),
    to_field("Int16Bias", False, "bias.type", to=_bias),
    noted("AdjustBiasScale", True, _BIAS_STEP),
    noted("AdjustWeightScaleForInt32Bias", False, "a weight's scale grows where its bias would not fit."),
    switched("Int16Scale", False, ", ".join(_SCALES), dict.fromkeys(_SCALES, "int16")),
    computed("UsePowerOf2Scale", True, ", ".join(_SCALES), _power_of_two),
    noted("UseUnsignedReLU", False, "activations have the type of the config; QUInt8 is unsigned."),
    noted("QuantizeFP16", False, _FP16),
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


_STATISTICS = "save_and_restore.npz"


def _statistics(value: Any, request: Request) -> Effect:
    if isinstance(value, bool):
        note = f"SaveAndRestore: ranges are kept in {_STATISTICS}; a path names another file"
        return Effect(run={"statistics": _STATISTICS}, note=note) if value else rows.NOTHING
    return Effect(run={"statistics": value})


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
    to_field("CalibDataSize", None, "data.samples", rows.COUNT),
    to_field("CalibTensorRangeSymmetric", None, "calibration.symmetric_range", rows.SWITCH),
    to_field("CalibMovingAverage", False, "calibration.moving_average", to=_moving_average),
    to_field(
        "CalibMovingAverageConstant", None, "calibration.moving_average", rows.NUMBER, to=_moving_average
    ),
    computed("NumBins", None, "nothing, up to 8192; refused above", _bins, rows.INTEGER),
    refused("NumQuantizedBins", 128, "entropy has as many levels as the type.", "Leave it at 128."),
    to_field("Percentile", 99.999, "calibration.percentile"),
    to_field("Scenario", "same", "calibration.scenario", rows.one_of("same", "p3")),
    to_field("LWPMetric", "mae", "calibration.metric", rows.one_of("mae", "mse")),
    to_field("PercentileCandidates", None, "calibration.candidates", rows.NUMBERS),
    noted("LWPUseHistogram", True, "ranges come from histograms."),
    to_field("MinMSEModePof2Scale", "All", "calibration.mode", rows.one_of(*_MODES), to=_mode),
    to_field("MinMSEMode", "All", "calibration.mode", rows.one_of(*_MODES), to=_mode),
    to_field("WeightCalibrateMethod", None, "weights.method", to=_weight_method),
    noted("MinMSEModeFloatScale", None, "a weight's range is searched over all its values."),
    noted("CalibOptimizeMem", True, "calibration holds one batch at a time and uses no disk."),
    noted("CalibWorkerNum", 1, "calibration uses the cores that there are."),
    refused("CalibPassthroughOpTypes", [], *_SHARED),
    refused("SaveTensorHistFig", False, *_NO_PICTURES),
    computed("SaveAndRestore", None, "the run: statistics", _statistics, rows.PATH_OR_SWITCH),
    to_run("TensorsRangeFile", None, "statistics", rows.PATH),
    to_run("UseRandomData", False, "random_data"),
    to_run("RandomDataReaderInputShape", {}, "random_shapes"),
    to_run("RandomDataReaderInputDataRange", None, "random_ranges", rows.TABLE),
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
        "QuantizationPreference", None, "improve.*, calibration.mode", _preference, rows.one_of(*_PREFERENCES)
    ),
)
