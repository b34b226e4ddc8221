"""Options about the float graph before it is quantized."""

from __future__ import annotations

from typing import Any

from roundel.quark.errors import QuarkConfigError
from roundel.quark.request import Request
from roundel.quark.rows import (
    INTEGER,
    SWITCH,
    TABLE,
    TEXT,
    TEXTS,
    Effect,
    Option,
    always,
    computed,
    refusal,
    refused,
    to_field,
)
from roundel.recipe import Prepare
from roundel.tools.words import shapes

_SWITCHES = tuple(name for name, row in Prepare.model_fields.items() if row.annotation is bool)
_LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm"})


def _skip_all(value: Any, request: Request) -> Effect:
    return Effect(recipe={f"prepare.{name}": False for name in _SWITCHES} if value else {})


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
    refused("ShapeShifterYaml", None, _YAML, _YAML_INSTEAD),
    refused("PreprocessYAML", None, _YAML, _YAML_INSTEAD),
    to_field("SimplifyModel", True, SWITCH, "prepare.fold_constants"),
    refused(
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
    computed("SkipPreprocess", False, SWITCH, "prepare.* (every pass off)", _skip_all),
)
