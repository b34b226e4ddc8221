"""Bodies for AMD's custom operators, so that a stock ONNX Runtime runs them without a library.

An operator keeps AMD's name and domain. Its body is a function inside the model, written in standard
operators and equal, bit for bit, to the numerics. What decides a body (format, rounding mode, length of the
lines …) is read when it is attached; different ones of an operator are told apart by their overload.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import onnx_ir as ir

from roundel.errors import ModelError
from roundel.model.graph import opset_version
from roundel.qdq.functions import blocks, body
from roundel.qdq.functions.blocks import BFP, MX
from roundel.qdq.nodes import QUARK

__all__ = ["attach", "strip"]

_IR_FUNCTION_DEFAULTS = 9
_IR_OVERLOADS = 10


class _Operator(NamedTuple):
    """How a node's variant is read, and how that variant's body is written."""

    variant: Callable[[ir.Node], Hashable]
    build: Callable[[Any, str, int], ir.Function]


_OPERATORS: dict[str, _Operator] = {
    "ExtendedQuantizeLinear": _Operator(body.LinearFunction.of, body.quantize_function),
    "ExtendedDequantizeLinear": _Operator(body.LinearFunction.of, body.dequantize_function),
    BFP: _Operator(blocks.Variant.of, blocks.build),
    MX: _Operator(blocks.Variant.of, blocks.build),
}


def attach(model: ir.Model) -> ir.Model:
    """A copy in which every custom operator has its function; a model without any comes back equal.

    Raises:
        ModelError: a custom operator for which there is no body.
    """
    result = strip(model)
    opset = opset_version(result)
    seen: dict[str, list[Hashable]] = {}
    for node in result.graph.all_nodes():
        if node.domain != QUARK:
            continue
        operator = _operator(node)
        variant = operator.variant(node)
        known = seen.setdefault(node.op_type, [])
        first = variant not in known
        if first:
            known.append(variant)
        # The first variant needs no overload: fewer readers know that field.
        node.overload = str(variant) if known.index(variant) else ""
        if first:
            function = operator.build(variant, node.overload, opset)
            result.functions[function.identifier()] = function
    if seen:
        overloaded = any(len(variants) > 1 for variants in seen.values())
        needed = _IR_OVERLOADS if overloaded else _IR_FUNCTION_DEFAULTS
        result.ir_version = max(result.ir_version, needed)
        result.graph.opset_imports.setdefault(QUARK, 1)
    return result


def strip(model: ir.Model) -> ir.Model:
    """A copy in the bare form, for AMD's tools: the same nodes without their functions."""
    result = model.clone()
    for key in [key for key in result.functions if key[0] == QUARK and key[1] in _OPERATORS]:
        del result.functions[key]
    for node in result.graph.all_nodes():
        if node.domain == QUARK:
            node.overload = ""
    return result


def _operator(node: ir.Node) -> _Operator:
    found = _OPERATORS.get(node.op_type)
    if found is None:
        raise ModelError(
            "This custom operator has no function body.",
            where=f"node {node.name}",
            observed=f"{node.domain} {node.op_type}",
            expected=f"one of {', '.join(_OPERATORS)}",
        )
    return found
