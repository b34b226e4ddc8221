"""What the fields of a config mean in a recipe, before its extra options have their say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from roundel.quark.enums import CalibrationMethod, PowerOfTwoMethod
from roundel.quark.errors import QuarkConfigError
from roundel.quark.presets import get_default_config, preset_names
from roundel.quark.request import Request
from roundel.recipe import Prepare

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


# What counts where activations are measured at run time.
DYNAMIC = frozenset(
    {
        *("weights.symmetric", "weights.type", "placement.matmul_const_only", "selection.all_op_types"),
        *(f"prepare.{name}" for name in Prepare.model_fields),
        "output.opset",
    }
)


def base_values(request: Request) -> dict[str, Any]:
    """Recipe values by dotted name; later ones win."""
    if request.config.use_dynamic_quant:
        return dict(_dynamic(request))
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
    if method == "minmax" and _by_name(request):
        method = "mse"
    yield "calibration.method", method
    yield "calibration.symmetric_range", cut


def _by_name(request: Request) -> bool:
    """Whether a preset was asked for by name and its method left alone: then 8-bit ranges go by error.

    A name stands for a format. Somebody who writes CalibrationMethod.MinMax into a config gets it.
    """
    config = request.config
    if config.preset not in preset_names() or request.asked("CalibMovingAverage"):
        return False
    unchanged = get_default_config(config.preset).calibrate_method is config.calibrate_method
    floating = config.calibrate_method is CalibrationMethod.MinMax
    return unchanged and floating and request.activation in ("int8", "uint8")


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
    tuned = request.config.include_fast_ft or "FastFinetune" in request.options
    integers = request.integer_weights
    untuned = "fast" if integers else "none"
    yield "effort", "high" if tuned else untuned
    yield "improve.rounding", integers
    yield "improve.equalize.enabled", integers and request.config.include_cle
    if tuned:
        yield "improve.finetune.algorithm", "adaround" if integers else "adaquant"


def _dynamic(request: Request) -> Values:
    yield from _identity(request)
    yield "mode", "dynamic"
    yield "weights.type", request.weight
    yield "weights.symmetric", request.asked("WeightSymmetric", request.weight not in _UNSIGNED)
    yield "weights.per_channel", request.config.per_channel
    yield "weights.reduce_range", request.config.reduce_range
    yield "selection.op_types", ("Conv", "Gemm", "MatMul")
    yield "placement.matmul_const_only", True
