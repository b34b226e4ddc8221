"""Attention masks: numbers so far below all others that Softmax makes zeros of them; how they are observed.

A mask adds -1e4, the smallest float or -infinity to scores that must not count. As a range that would leave
one step for all real scores. It needs no such range: any value far enough below the best score of its row
becomes the same zero. So a hidden value counts as lying `gap` below, and the written range holds just that;
the quantizer's saturation brings what is lower to its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir

from roundel.model.graph import DEFAULT_DOMAINS, attribute_float, attribute_int, constant_array, op_key
from roundel.numerics.scales import ReaderFunction
from roundel.targets.operators import OPERATORS, Trait, ops_with
from roundel.types import Array, Doubles

FAR = -1e3
"""A constant at or below it is a mask: no score of a network that works lies there."""
SCORE_GAP = 12.0
"""Below the best of its row: a share of 6e-6 for each hidden place."""
MASK_GAP = 1024.0
"""Below zero, for the mask itself: more than scores differ by, and as its values are two it costs nothing."""

# Not Split: what is told of a node here is told of its first output.
_MOVING = ops_with(Trait.SHAPES | Trait.SELECTS | Trait.REPEATS | Trait.CASTS) - {"Split"}


@dataclass(frozen=True, slots=True)
class Mask:
    """How one tensor is observed.

    Attributes:
        floor: values at or below it are hidden.
        gap: how far below the best they are taken to lie.
        axis: of the rows, or None where the whole tensor is one.
    """

    floor: float
    gap: float
    axis: int | None

    def tamed(self, array: Array) -> Array:
        """The values, with hidden ones `gap` below the best that is not, of the row or of the tensor."""
        hidden = array <= self.floor
        if not hidden.any():
            return array
        shown = np.where(hidden, -np.inf, array)
        best = shown.max(axis=self.axis, keepdims=True)
        best = np.where(np.isneginf(best), _best(shown), best)
        return np.where(hidden, best - self.gap, array).astype(array.dtype)


def _best(shown: Array) -> float:
    best = float(shown.max())
    return 0.0 if np.isneginf(best) else best


def masked_tensors(graph: ir.Graph) -> dict[str, Mask]:
    """The tensors that carry a mask to a Softmax, and to nothing else."""
    far: dict[ir.Value, float] = {}
    for node in graph:
        found = _far_output(node, far) if node.domain in DEFAULT_DOMAINS else None
        if found is not None:
            far[node.outputs[0]] = found
    axes: dict[ir.Value, int | None] = {}
    for value in reversed(far):
        uses = value.uses()
        if uses and not value.is_graph_output() and all(_ends(use.node, axes) for use in uses):
            axes[value] = _softmax_axis(value)
    return {str(value.name): _mask(far[value], axis) for value, axis in axes.items()}


def _mask(far: float, axis: int | None) -> Mask:
    gap = MASK_GAP if axis is None else SCORE_GAP
    return Mask(far / 2 if np.isfinite(far) else -float(np.finfo(np.float32).max), gap, axis)


def _far_output(node: ir.Node, far: Mapping[ir.Value, float]) -> float | None:
    """The mask's value in what a node makes, or None where it makes no mask."""
    inputs = list(node.inputs)
    if node.op_type == "Where":
        parts = inputs[1:3]
    elif node.op_type == "Add":
        parts = inputs[:2]
    elif node.op_type == "Mul":
        # The usual (1 - mask) * -1e4; a mask times anything else is none any more.
        return next((f for f in (_far_constant(v) for v in inputs[:2]) if f is not None), None)
    elif node.op_type in _MOVING or node.op_type == "Sub":
        parts = inputs[:1]
    else:
        return None
    found = [_far(value, far) for value in parts if value is not None]
    return max((value for value in found if value is not None), default=None)


def _far(value: ir.Value, far: Mapping[ir.Value, float]) -> float | None:
    return far[value] if value in far else _far_constant(value)


def _far_constant(value: ir.Value | None) -> float | None:
    if value is None or value.dtype is not ir.DataType.FLOAT:
        return None
    array = constant_array(value)
    if array is None or array.size == 0:
        return None
    hidden = array[array <= FAR]
    return float(hidden.max()) if hidden.size else None


def _ends(node: ir.Node, axes: Mapping[ir.Value, int | None]) -> bool:
    """Whether what a node makes of a mask ends in a Softmax."""
    return node.op_type == "Softmax" or (len(node.outputs) > 0 and node.outputs[0] in axes)


def _softmax_axis(value: ir.Value) -> int | None:
    """Of the Softmax that reads it at once."""
    for node in value.consumers():
        if node.op_type == "Softmax":
            return attribute_int(node, "axis", -1)
    return None


def reader_functions(graph: ir.Graph) -> dict[str, ReaderFunction]:
    """For each tensor that only such a function reads, the function."""
    found = {}
    for node in graph:
        function = _function(node)
        value = node.inputs[0] if function is not None else None
        if function is None or value is None or value.is_graph_output():
            continue
        others = [use.node for use in value.uses() if use.node is not node]
        if not others:
            found[str(value.name)] = function
        elif len(others) == 1 and _gates(node, others[0], value):
            found[str(value.name)] = partial(_gated, function)
    return found


def _gates(node: ir.Node, product: ir.Node, value: ir.Value) -> bool:
    """Whether the product of the value and what the node makes of it is all that is seen of either."""
    made = node.outputs[0]
    alone = not made.is_graph_output() and [use.node for use in made.uses()] == [product]
    return alone and op_key(product) == "Mul" and set(product.inputs) == {value, made}


def _gated(gate: ReaderFunction, x: Doubles) -> Doubles:
    return x * gate(x)


def _function(node: ir.Node) -> ReaderFunction | None:
    row = OPERATORS.get(op_key(node))
    if row is None or row.function is None:
        return None
    given = {name: attribute_float(node, name, usual) for name, usual in row.attributes.items()}
    return partial(row.function, **given)
