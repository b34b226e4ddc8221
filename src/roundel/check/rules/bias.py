"""32-bit biases that do not fit (P20)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from roundel.check.facts import Facts
from roundel.check.types import Hit, Rule, Severity
from roundel.model.graph import constant_array, op_key
from roundel.plan.types import Role
from roundel.types import QType

_LAYERS = ("Conv", "ConvTranspose", "Gemm")
_INT32 = np.iinfo(np.int32)
_USUAL_RANGE = 0.01  # activations with a smaller peak are rare


def _overflow(facts: Facts) -> Iterator[Hit]:
    if facts.stored is not None:
        yield from _saturated(facts)
    elif facts.plan is not None and facts.recipe.bias.type == "int32":
        for node in facts.prepared.graph:
            yield from _potential(facts, node)


def _saturated(facts: Facts) -> Iterator[Hit]:
    """Codes at the ends of int32 are biases that were cut off."""
    assert facts.stored is not None
    for tensor in facts.stored.tensors.values():
        if tensor.codes is None or tensor.codes.dtype != np.int32:
            continue
        cut = int(np.count_nonzero((tensor.codes >= _INT32.max) | (tensor.codes <= _INT32.min + 1)))
        if cut:
            text = f"{cut} of {tensor.codes.size} stored biases are cut off at the end of int32"
            yield Hit(Severity.ERROR, text, tensor.name)


def _potential(facts: Facts, node: ir.Node) -> Iterator[Hit]:
    """The peak of the input below which b / (s_x * s_w) leaves int32."""
    plan = facts.plan
    bias = node.inputs[2] if len(node.inputs) > 2 and op_key(node) in _LAYERS else None
    values, weight = constant_array(bias), constant_array(node.inputs[1] if bias is not None else None)
    if plan is None or bias is None or values is None or weight is None or not values.size:
        return
    planned = plan.tensors.get(str(bias.name))
    peak_weight = float(np.abs(weight).max(initial=0))
    if planned is None or planned.role is not Role.BIAS or not np.isfinite(peak_weight) or peak_weight == 0:
        return
    peak_bias = float(np.abs(values).max())
    steps = QType(facts.recipe.activations.type)
    largest = steps.qmax if steps.signed else (steps.qmax + 1) // 2 - 1
    weight_scale = peak_weight / QType.INT8.qmax
    least = peak_bias * largest / (weight_scale * _INT32.max)
    if least > _USUAL_RANGE:
        text = (
            f"largest bias {peak_bias:.3g} against largest weight {peak_weight:.3g}: "
            f"overflows when the input's peak stays below {least:.3g}"
        )
        yield Hit(Severity.WARNING, text, str(node.name))


RULES = (
    Rule(
        "P20",
        "bias overflow",
        "A bias is stored as b / (input scale x weight scale) in 32 bits; what does not fit is cut off.",
        "Clamp tiny weight scales, keep the layer in float (--exclude NAME), or -s bias.type=float.",
        _overflow,
    ),
)
