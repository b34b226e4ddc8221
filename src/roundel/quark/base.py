"""What the fields of a config mean in a recipe, before its extra options have their say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from roundel.quark.enums import PowerOfTwoMethod
from roundel.quark.errors import QuarkConfigError
from roundel.quark.presets import get_default_config, preset_names
from roundel.quark.request import Request
from roundel.recipe import Prepare
from roundel.recipe_file import load_preset

_UNSIGNED = frozenset({"uint8", "uint16"})
_ALIGNED = ("align_concat", "align_pool", "align_pad", "align_slice")
_ENGINE = (
    *("adjust_shift_read", "adjust_shift_write", "adjust_shift_cut", "adjust_shift_bias"),
    *("adjust_hard_sigmoid", "adjust_shift_swish", "leaky_relu", "sigmoid_to_hard_sigmoid"),
    *("hard_sigmoid", "average_pool", "reduce_mean"),
)
_CONVERSIONS = (
    *("split_to_slice", "batch_norm_to_conv"),
    *("reduce_mean_to_global_average_pool", "split_large_pools"),
)


# Nothing of the NPU's is needed where only MatMul changes.
_KEPT_AS_IS = ("decompose_hard_swish", "explicit_conv_attributes", "unshare_biases")
# Presets of the documents that stand for a format, and the preset that shows how its ranges are best chosen.
_OWN_RANGES = {"A8W8": "a8w8", "A16W8": "a16w8", "INT8_CNN_DEFAULT": "a8w8"}
# What counts where activations are measured at run time.
_GRAPH = frozenset({"output.opset", *(f"prepare.{name}" for name in Prepare.model_fields)})
_RUN_TIME = {"weights.symmetric", "weights.type", "placement.matmul_const_only", "selection.all_op_types"}


def counts(path: str, request: Request) -> bool:
    """Whether a recipe value means anything in the config's mode."""
    if request.config.use_dynamic_quant:
        return path in _GRAPH | _RUN_TIME
    if request.few_bits:
        return path in _GRAPH or path.split(".")[0] in ("mode", "weight_only", "data")
    return True


def base_values(request: Request) -> dict[str, Any]:
    """Recipe values by dotted name; later ones win."""
    if request.config.use_dynamic_quant:
        return dict(_dynamic(request))
    if request.few_bits:
        return dict(_few_bits(request))
    return {
        **dict(_identity(request)),
        **dict(_numbers(request)),
        **dict(_calibration(request)),
        **dict(_placement(request)),
        **dict(_preparation(request)),
        **dict(_steps(request)),
    }


Values = Iterator[tuple[str, Any]]


def _identity(request: Request) -> Values:
    yield "name", (request.config.preset or "quark script").casefold()
    yield "output.external_data", request.config.use_external_data_format


def _numbers(request: Request) -> Values:
    config = request.config
    yield "activations.type", request.activation
    yield "weights.type", request.weight
    if request.integer_activations:
        yield "activations.symmetric", request.asked("ActivationSymmetric", False)
        yield "activations.scale", request.scale
    if request.integer_weights:
        yield "weights.symmetric", request.asked("WeightSymmetric", request.weight not in _UNSIGNED)
        yield "weights.scale", request.scale
        yield "weights.per_channel", config.per_channel
        yield "weights.reduce_range", config.reduce_range
    elif config.per_channel or config.reduce_range:
        raise QuarkConfigError(
            "per_channel and reduce_range are about integers.",
            observed=f"weights in {request.weight}",
            hint="Leave both at False for this type.",
        )
    if request.integer_activations and request.integer_weights:
        yield "bias.type", "int8" if request.npu else "int32"
    else:
        yield "bias.type", "weights"


def _calibration(request: Request) -> Values:
    if request.integer_weights:
        # A weight's range is chosen by error unless nothing may be cut off.
        keeps_all = request.config.calibrate_method is PowerOfTwoMethod.NonOverflow
        yield "weights.method", "minmax" if keeps_all else "mse"
    if not request.integer_activations and not request.asked("ActivationScaled"):
        return
    method, _, cut = request.method
    yield "calibration.method", method
    yield "calibration.symmetric_range", cut
    yield from _chosen_by_name(request)


def _chosen_by_name(request: Request) -> Values:
    """Ranges as Roundel's own preset chooses them, for a preset that was asked for by name.

    A name stands for a format. Somebody who writes CalibrationMethod.MinMax into a config gets that.
    """
    config = request.config
    stem = str(config.preset).removesuffix("_ADAROUND").removesuffix("_ADAQUANT")
    if stem not in _OWN_RANGES or config.preset not in preset_names() or request.asked("CalibMovingAverage"):
        return
    if get_default_config(config.preset).calibrate_method is config.calibrate_method:
        ranges = load_preset(_OWN_RANGES[stem]).calibration.model_dump(exclude_defaults=True)
        yield from ((f"calibration.{name}", value) for name, value in ranges.items())


def _placement(request: Request) -> Values:
    config = request.config
    whole = config.enable_npu_cnn or request.extended
    if config.enable_npu_transformer:
        yield "placement.operators", "matmul"
        yield "placement.matmul_const_only", True
    else:
        yield "placement.operators", "extended" if whole else "standard"
    if request.integer_activations or request.integer_weights:
        yield "placement.domain", "com.microsoft" if request.extended else "ai.onnx"
    # The plain formats leave out a Relu that saturation replaces; the extended one only when told to.
    if request.integer_activations and not request.extended and not config.enable_npu_transformer:
        yield "placement.fold_relu", not request.asked("ActivationSymmetric", False)
    yield "placement.quantize_passthrough_inputs", False
    if request.block_activations:
        yield "placement.fuse_activations", False
    if request.npu:
        yield from ((f"placement.{name}", True) for name in _ALIGNED)
        yield from ((f"npu.{name}", True) for name in _ENGINE)


def _preparation(request: Request) -> Values:
    config = request.config
    hardware = config.enable_npu_cnn or config.enable_npu_transformer
    if hardware or (request.extended and not request.casts):
        yield from ((f"prepare.{name}", True) for name in _CONVERSIONS)
    if request.npu:
        yield "prepare.unshare_weights", True
    yield "prepare.fold_batch_norm", config.optimize_model or request.asked("SimplifyModel", True)
    yield "prepare.decompose_hard_swish", config.optimize_model
    yield "prepare.nchw_to_nhwc", config.convert_nchw_to_nhwc


def _steps(request: Request) -> Values:
    """Accuracy by default: ranges, rounding and biases by error, equalization where the config has it."""
    integers = request.integer_weights
    yield "effort", request.effort
    for part in ("front_end", "detection_head"):
        yield f"improve.{part}", not request.integer_activations  # the same placement
    yield "improve.rounding", integers and request.integer_activations
    yield "improve.ranges", request.integer_activations
    yield "improve.equalize.enabled", integers and request.config.include_cle
    yield "improve.smooth.enabled", request.config.include_sq
    yield "improve.smooth.insert", request.config.include_sq
    yield "improve.rotate.enabled", request.config.include_rotation
    if request.tuned:
        yield "improve.finetune.algorithm", "adaround" if integers else "adaquant"


def _few_bits(request: Request) -> Values:
    yield from _identity(request)
    yield "mode", "weight_only"
    yield "weight_only.bits", 4 if request.asked("UseMatMulNBits") else 8
    yield from ((f"prepare.{name}", False) for name in _KEPT_AS_IS)


def _dynamic(request: Request) -> Values:
    yield from _identity(request)
    yield "mode", "dynamic"
    yield "weights.type", request.weight
    yield "weights.symmetric", request.asked("WeightSymmetric", request.weight not in _UNSIGNED)
    yield "weights.per_channel", request.config.per_channel
    yield "weights.reduce_range", request.config.reduce_range
    yield "selection.op_types", ("Conv", "Gemm", "MatMul")
    yield "placement.matmul_const_only", True
