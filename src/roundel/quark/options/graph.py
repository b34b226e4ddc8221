"""Options about the float graph before it is quantized."""

from __future__ import annotations

from typing import Any

from roundel.quark.config import classic_key
from roundel.quark.errors import QuarkConfigError
from roundel.quark.request import ALIGNED, LIMITS, Request
from roundel.quark.rows import (
    ANY,
    COUNT,
    INTEGER,
    PATH,
    SWITCH,
    TABLE,
    TEXT,
    TEXTS,
    Effect,
    Option,
    always,
    computed,
    refusal,
    refused_option,
    switched,
    to_field,
    to_run,
)
from roundel.quark.rows import (
    PAIRS as PAIR_LIST,
)
from roundel.quark.selection import from_mixed_precision, from_tensor_overrides
from roundel.quark.tools.tool import shapes
from roundel.recipe.settings import Prepare

_SWITCHES = tuple(name for name, row in Prepare.model_fields.items() if row.annotation is bool)
_LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm"})


def _unshare_weights(value: Any, request: Request) -> Effect:
    """A list of operator types whose weights are copied; an empty one means all of them."""
    others = sorted(set(value) - _LAYERS)
    if others:
        why = f"weights are copied for {', '.join(sorted(_LAYERS))} only."
        raise refusal("CopySharedInit", value, why, f"Leave out {', '.join(others)}.")
    return Effect(recipe={"prepare.unshare_weights": True})


def _unshare_biases(value: Any, request: Request) -> Effect:
    return Effect(recipe={"prepare.unshare_biases": bool(value)})


def _opset(value: Any, request: Request) -> Effect:
    if value not in (17, 21):
        why = "files are written at opset 17, or at 21 with native 16-bit Q/DQ."
        raise refusal("ConvertOpsetVersion", value, why, "Use 17 or 21; a newer model keeps its opset.")
    return Effect(recipe={"output.opset": value})


def fixed_shapes(text: str, where: str = "extra_options['FixShapes']") -> dict[str, tuple[int, ...]]:
    """'input_1:[1,3,224,224];input_2:[1,96]' by name.

    Raises:
        QuarkConfigError: the text has another form.
    """
    try:
        return shapes(text)
    except ValueError as error:
        raise QuarkConfigError(
            "A fixed shape cannot be read.", where=where, observed=error, expected="name:[1,3,224,224]"
        ) from error


def _fix_shapes(value: Any, request: Request) -> Effect:
    return Effect(recipe={"prepare.fixed_shapes": fixed_shapes(value)})


_YAML = "its passes are a program of their own, in files of their own format."
_YAML_INSTEAD = "Use the options ConvertOpsetVersion, FoldBatchNorm, Fuse…, Convert…, or a Roundel recipe."

GRAPH: tuple[Option, ...] = (
    refused_option("ShapeShifterYaml", None, _YAML, _YAML_INSTEAD),
    refused_option("PreprocessYAML", None, _YAML, _YAML_INSTEAD),
    to_field("SimplifyModel", True, SWITCH, "prepare.fold_constants"),
    refused_option(
        "SimplifyModelOptions", {}, "they belong to another simplifier.", "Use SimplifyModel alone.", TABLE
    ),
    computed("ConvertOpsetVersion", None, INTEGER, "output.opset", _opset),
    always(
        "RemoveInputInit",
        True,
        SWITCH,
        "a weight that is also listed as an input could be replaced at run time, so it never is.",
        refuse=(False,),
    ),
    computed("CopySharedInit", None, TEXTS, "prepare.unshare_weights", _unshare_weights),
    computed("CopyBiasInit", sorted(_LAYERS), TEXTS, "prepare.unshare_biases", _unshare_biases),
    to_field("FoldBatchNorm", True, SWITCH, "prepare.fold_batch_norm"),
    to_field("FuseInstanceNorm", True, SWITCH, "prepare.fuse_instance_norm"),
    to_field("FuseL2Norm", True, SWITCH, "prepare.fuse_l2_norm"),
    to_field("FuseGelu", True, SWITCH, "prepare.fuse_gelu"),
    to_field("FuseLayerNorm", True, SWITCH, "prepare.fuse_layer_norm"),
    to_field("ConvertSplitToSlice", False, SWITCH, "prepare.split_to_slice"),
    to_field("ConvertBNToConv", False, SWITCH, "prepare.batch_norm_to_conv"),
    to_field("ConvertReduceMeanToGlobalAvgPool", False, SWITCH, "prepare.reduce_mean_to_global_average_pool"),
    to_field("SplitLargeKernelPool", False, SWITCH, "prepare.split_large_pools"),
    to_field("ReplaceClip6Relu", False, SWITCH, "npu.clip_to_relu"),
    to_field("ConvertClipToRelu", False, SWITCH, "npu.clip_to_relu"),
    computed("FixShapes", None, TEXT, "prepare.fixed_shapes", _fix_shapes),
    switched(
        "SkipPreprocess",
        False,
        "prepare.* (every pass off)",
        {f"prepare.{name}": False for name in _SWITCHES},
    ),
)


_KEPT = {
    "RemoveQDQConvClip": "Clip",
    "RemoveQDQConvRelu": "Relu",
    "RemoveQDQConvLeakyRelu": "LeakyRelu",
    "RemoveQDQConvPRelu": "PRelu",
}
_BEFORE_GELU = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Add")
_AFTER_NORM = ("Relu", "LeakyRelu", "PRelu", "Clip")


def _keep_before(request: Request) -> tuple[str, ...]:
    return tuple(op for key, op in _KEPT.items() if not request.asked(key, True))


def _without_between(request: Request) -> tuple[tuple[str, str], ...]:
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


def _kept(value: Any, request: Request) -> Effect:
    return Effect(recipe={"placement.keep_pair_before": _keep_before(request)})


def _left_out(value: Any, request: Request) -> Effect:
    return Effect(recipe={"placement.no_pair_between": _without_between(request)})


def _fused(value: Any, request: Request) -> Effect:
    """Integers and short floats are always fused; block formats when told to."""
    return Effect(recipe={"placement.fuse_activations": value} if request.block_activations else {})


def _float_weights(value: Any, request: Request) -> Effect:
    """Float weights behind a Q/DQ pair: what short floats and blocks have anyhow, and integers never."""
    if not value or not request.integer_weights:
        return Effect()
    why = "integer weights are stored as integers, a quarter of the size."
    raise refusal("AddQDQPairToWeight", value, why, "Leave the option out: the model computes the same.")


PAIRS: tuple[Option, ...] = (
    computed("AddQDQPairToWeight", False, SWITCH, "nothing; refused for integers", _float_weights),
    to_field("ForceQuantizeNoInputCheck", False, SWITCH, "placement.quantize_passthrough_inputs"),
    to_field("DedicatedQDQPair", False, SWITCH, "placement.dedicated_pairs"),
    to_field("DedicateDQNode", False, SWITCH, "placement.dedicated_dequantizers"),
    refused_option(
        "EnableDualQuantNodePairs",
        False,
        "a tensor has one type, that of its maker.",
        "Give the tensors in between their types with TensorQuantOverrides.",
        SWITCH,
    ),
    to_field("OpTypesToExcludeOutputQuantization", [], TEXTS, "placement.skip_output_op_types"),
    to_run("NodesToExcludeOutputQuantization", [], TEXTS, "float_outputs_of"),
    refused_option(
        "QDQOpTypePerChannelSupportToAxis",
        {},
        "the channel axis follows from each operator.",
        "Use per_channel=True.",
        TABLE,
    ),
    switched("UseQDQContribOps", False, "placement.domain", {"placement.domain": "com.microsoft"}),
    *(computed(key, True, SWITCH, "placement.keep_pair_before", _kept) for key in _KEPT),
    computed("RemoveQDQConvGelu", False, SWITCH, "placement.no_pair_between", _left_out),
    computed("RemoveQDQInstanceNorm", False, SWITCH, "placement.no_pair_between", _left_out),
    computed("RemoveFusedQDQ", False, SWITCH, "placement.fuse_activations (block formats)", _fused),
    computed("RemoveQDQMulAdd", False, SWITCH, "placement.no_pair_between", _left_out),
    computed("RemoveQDQBetweenOps", None, PAIR_LIST, "placement.no_pair_between", _left_out),
    to_field("FoldRelu", False, SWITCH, "placement.fold_relu"),
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


ENGINE: tuple[Option, ...] = (
    *(to_field(key, False, SWITCH, f"npu.{name}") for key, name in _SIMULATED.items()),
    *(to_field(classic_key(name), False, SWITCH, f"npu.{name}") for name in LIMITS),
    *(to_field(classic_key(name), False, SWITCH, f"placement.{name}") for name in ALIGNED),
    always("AlignTranspose", False, SWITCH, "Transpose keeps its input's scale."),
    always("AlignReshape", False, SWITCH, "Reshape keeps its input's scale."),
    # The two switches for all of them come last: they win.
    switched(
        "SimulateDPU",
        True,
        "npu.* (all arithmetic off)",
        {f"npu.{name}": False for name in _SIMULATED.values()},
    ),
    switched(
        "NPULimitationCheck",
        True,
        "npu.adjust_* (all limits off)",
        {f"npu.{name}": False for name in LIMITS},
    ),
    always("MaxLoopNum", 5, COUNT, "limits are met by solving for them, not by repeating."),
)


def _tensors(value: Any, request: Request) -> Effect:
    return Effect(recipe={"overrides": from_tensor_overrides(value, request)})


def _mixed(value: Any, request: Request) -> Effect:
    if not request.config.specific_tensor_precision:
        return Effect(note="MixedPrecisionTensor counts only with specific_tensor_precision=True")
    return Effect(recipe={"overrides": from_mixed_precision(value)})


TARGETS: tuple[Option, ...] = (
    to_field("QuantizeAllOpTypes", False, SWITCH, "selection.all_op_types"),
    to_field("WeightsOnly", False, SWITCH, "placement.weights_only"),
    to_field("MatMulConstBOnly", False, SWITCH, "placement.matmul_const_only"),
    refused_option(
        "EnableSubgraph",
        False,
        "the bodies of If, Loop and Scan stay float.",
        "Inline them before, or leave them in float.",
        SWITCH,
    ),
    computed("MixedPrecisionTensor", {}, TABLE, "overrides", _mixed),
    computed("TensorQuantOverrides", {}, TABLE, "overrides", _tensors),
    refused_option(
        "NodesWithMixedPrecision",
        {},
        "it is an internal note of another program.",
        "Use TensorQuantOverrides.",
    ),
    to_field("AlignEltwiseQuantType", False, SWITCH, "placement.constants_as_activations"),
)


RUN: tuple[Option, ...] = (
    to_run("TmpDir", None, PATH, "temporary_folder"),
    refused_option(
        "UserCustomOpLibPath",
        None,
        "models run in a stock ONNX Runtime.",
        "Leave nodes of other domains out with nodes_to_exclude after converting them to standard ones.",
        ANY,
    ),
    to_run("EvalMetrics", None, ANY, "evaluate"),
    to_run("EvalDataReader", None, ANY, "evaluation_data"),
    always("FillAllValueInfo", False, SWITCH, "every tensor's type and shape are in the file."),
    refused_option(
        "EncryptionAlgorithm",
        None,
        "files are written in the clear.",
        "Encrypt the finished file, or use the execution provider's encryption_key.",
        TEXT,
    ),
    to_run("Recipe", {}, ANY, "recipe_changes"),
)
