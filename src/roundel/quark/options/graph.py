"""Options about the float graph before it is quantized."""

from __future__ import annotations

from typing import Any

from roundel.quark.config import classic_key
from roundel.quark.errors import QuarkConfigError
from roundel.quark.kinds import ANY, INTEGER, PAIRS, PATH, TEXT, TEXTS
from roundel.quark.request import ALIGNED, LIMITS, Request
from roundel.quark.rows import Effect, computed, noted, refused, switched, to_field, to_run, unsupported
from roundel.quark.selection import from_mixed_precision, from_tensor_overrides
from roundel.quark.tools.tool import shapes
from roundel.recipe.settings import Prepare

_LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm"})


def _unshare_weights(value: list[str], request: Request) -> bool:
    """A list of operator types whose weights are copied; an empty one means all of them."""
    others = sorted(set(value) - _LAYERS)
    if others:
        why = f"weights are copied for {', '.join(sorted(_LAYERS))} only."
        raise unsupported("CopySharedInit", value, why, f"Leave out {', '.join(others)}.")
    return True


def _opset(value: int, request: Request) -> int:
    if value not in (17, 21):
        why = "files are written at opset 17, or at 21 with native 16-bit Q/DQ."
        raise unsupported("ConvertOpsetVersion", value, why, "Use 17 or 21; a newer model keeps its opset.")
    return value


def _fixed_shapes(text: str, request: Request) -> dict[str, tuple[int, ...]]:
    """'input_1:[1,3,224,224];input_2:[1,96]' by name."""
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
    to_field("ConvertOpsetVersion", None, "output.opset", INTEGER, to=_opset),
    noted("RemoveInputInit", True, "a weight is never an input, which could replace it.", refuse=False),
    to_field("CopySharedInit", None, "prepare.unshare_weights", TEXTS, to=_unshare_weights),
    to_field("CopyBiasInit", sorted(_LAYERS), "prepare.unshare_biases", to=lambda value, _: bool(value)),
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
    to_field("FixShapes", None, "prepare.fixed_shapes", TEXT, to=_fixed_shapes),
    switched("SkipPreprocess", False, "prepare.* (every pass off)", _NO_PASS),
)

_KEPT = {
    "RemoveQDQConvClip": "Clip",
    "RemoveQDQConvRelu": "Relu",
    "RemoveQDQConvLeakyRelu": "LeakyRelu",
    "RemoveQDQConvPRelu": "PRelu",
}
_BEFORE_GELU = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Add")
_AFTER_NORM = ("Relu", "LeakyRelu", "PRelu", "Clip")
_BETWEEN = "placement.no_pair_between"


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
        return Effect()
    why = "integer weights are stored as integers, a quarter of the size."
    raise unsupported("AddQDQPairToWeight", value, why, "Leave the option out: the model computes the same.")


BETWEEN = (
    computed("AddQDQPairToWeight", False, "nothing; refused for integers", _float_weights),
    to_field("ForceQuantizeNoInputCheck", False, "placement.quantize_passthrough_inputs"),
    to_field("DedicatedQDQPair", False, "placement.dedicated_pairs"),
    to_field("DedicateDQNode", False, "placement.dedicated_dequantizers"),
    refused(
        "EnableDualQuantNodePairs",
        False,
        "a tensor has its maker's type.",
        "Set types with TensorQuantOverrides.",
    ),
    to_field("OpTypesToExcludeOutputQuantization", [], "placement.skip_output_op_types"),
    to_run("NodesToExcludeOutputQuantization", [], "float_outputs_of"),
    refused(
        "QDQOpTypePerChannelSupportToAxis", {}, "the axis follows from the operator.", "Use per_channel=True."
    ),
    switched("UseQDQContribOps", False, "placement.domain", {"placement.domain": "com.microsoft"}),
    *(to_field(key, True, "placement.keep_pair_before", to=_keep_before) for key in _KEPT),
    to_field("RemoveQDQConvGelu", False, _BETWEEN, to=_left_out),
    to_field("RemoveQDQInstanceNorm", False, _BETWEEN, to=_left_out),
    to_field("RemoveFusedQDQ", False, "placement.fuse_activations", to=_fused),
    to_field("RemoveQDQMulAdd", False, _BETWEEN, to=_left_out),
    to_field("RemoveQDQBetweenOps", None, _BETWEEN, PAIRS, to=_left_out),
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
    to_run("TmpDir", None, "temporary_folder", PATH),
    refused("UserCustomOpLibPath", None, _STOCK, "Name nodes of other domains in nodes_to_exclude."),
    to_run("EvalMetrics", None, "evaluate"),
    to_run("EvalDataReader", None, "evaluation_data"),
    noted("FillAllValueInfo", False, "every tensor's type and shape are in the file."),
    refused("EncryptionAlgorithm", None, _CLEAR, "Encrypt the file, or use the provider's encryption_key."),
    to_run("Recipe", {}, "recipe_changes", ANY),
)
