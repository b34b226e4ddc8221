"""Options about which nodes and tensors are quantized, and single tensors that are treated otherwise."""

from __future__ import annotations

from typing import Any

from roundel.quark.overrides import from_mixed_precision, from_tensor_overrides
from roundel.quark.request import Request
from roundel.quark.rows import SWITCH, TABLE, Effect, Option, computed, refused, to_field


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
    refused(
        "EnableSubgraph",
        False,
        "the bodies of If, Loop and Scan stay float.",
        "Inline them before, or leave them in float.",
        SWITCH,
    ),
    computed("MixedPrecisionTensor", {}, TABLE, "overrides", _mixed),
    computed("TensorQuantOverrides", {}, TABLE, "overrides", _tensors),
    refused(
        "NodesWithMixedPrecision",
        {},
        "it is an internal note of another program.",
        "Use TensorQuantOverrides.",
    ),
    to_field("AlignEltwiseQuantType", False, SWITCH, "placement.constants_as_activations"),
)
