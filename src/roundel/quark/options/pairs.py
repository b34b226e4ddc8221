"""Options about where Q/DQ pairs go."""

from __future__ import annotations

from typing import Any

from roundel.quark.request import Request
from roundel.quark.rows import (
    PAIRS as PAIR_LIST,
)
from roundel.quark.rows import (
    SWITCH,
    TABLE,
    TEXTS,
    Effect,
    Option,
    computed,
    refusal,
    refused,
    to_field,
    to_run,
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


def _contrib(value: Any, request: Request) -> Effect:
    return Effect(recipe={"placement.domain": "com.microsoft"} if value else {})


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
    refused(
        "EnableDualQuantNodePairs",
        False,
        "a tensor has one type, that of its maker.",
        "Give the tensors in between their types with TensorQuantOverrides.",
        SWITCH,
    ),
    to_field("OpTypesToExcludeOutputQuantization", [], TEXTS, "placement.skip_output_op_types"),
    to_run("NodesToExcludeOutputQuantization", [], TEXTS, "float_outputs_of"),
    refused(
        "QDQOpTypePerChannelSupportToAxis",
        {},
        "the channel axis follows from each operator.",
        "Use per_channel=True.",
        TABLE,
    ),
    computed("UseQDQContribOps", False, SWITCH, "placement.domain", _contrib),
    *(computed(key, True, SWITCH, "placement.keep_pair_before", _kept) for key in _KEPT),
    computed("RemoveQDQConvGelu", False, SWITCH, "placement.no_pair_between", _left_out),
    computed("RemoveQDQInstanceNorm", False, SWITCH, "placement.no_pair_between", _left_out),
    computed("RemoveFusedQDQ", False, SWITCH, "placement.fuse_activations (block formats)", _fused),
    computed("RemoveQDQMulAdd", False, SWITCH, "placement.no_pair_between", _left_out),
    computed("RemoveQDQBetweenOps", None, PAIR_LIST, "placement.no_pair_between", _left_out),
    to_field("FoldRelu", False, SWITCH, "placement.fold_relu"),
)
