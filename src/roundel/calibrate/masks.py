"""Attention masks: which tensors carry one, how they are observed, and which inputs it is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from roundel.model.graph import DEFAULT_DOMAINS, attribute_int, constant_array
from roundel.targets.operators import Trait, ops_with
from roundel.types import Array

# A mask: numbers so far below all others that Softmax makes zeros of them. A mask adds -1e4, the
# smallest float or -infinity to scores that must not count. As a range that would leave one step for all real
# scores. It needs no such range: any value far enough below the best score of its row becomes the same zero.
# So a hidden value counts as lying `gap` below, and the written range holds just that; the quantizer's
# saturation brings what is lower to its end.
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
        """The values, with hidden ones `gap` below the best that is not, of the row or of the tensor.

        Where a sample hides nothing, others will: each row gets one such value more.
        """
        hidden = array <= self.floor
        if not array.size:
            return array
        if not hidden.any():
            row = array if self.axis is not None else array.reshape(-1)
            axis = self.axis or 0
            low = row.max(axis=axis, keepdims=True) - self.gap
            return np.concatenate([row, low.astype(array.dtype)], axis=axis)
        shown = np.where(hidden, -np.inf, array)
        best, top = shown.max(axis=self.axis, keepdims=True), float(shown.max())
        best = np.where(np.isneginf(best), 0.0 if np.isneginf(top) else top, best)
        return np.where(hidden, best - self.gap, array).astype(array.dtype)


def masked_tensors(graph: ir.Graph) -> dict[str, Mask]:
    """The tensors that carry a mask to a Softmax, and to nothing else."""
    far: dict[ir.Value, float] = {}
    for node in graph:
        found = _far_output(node, far) if node.domain in DEFAULT_DOMAINS else None
        if found is not None:
            far[node.outputs[0]] = found
    axes: dict[ir.Value, int | None] = {}
    masks: dict[str, Mask] = {}
    for value in reversed(far):
        uses = value.uses()
        if uses and not value.is_graph_output() and all(_reaches(use.node, axes) for use in uses):
            # Of the Softmax that reads it at once.
            ends = (n for n in value.consumers() if n.op_type == "Softmax")
            axes[value] = axis = next((attribute_int(node, "axis", -1) for node in ends), None)
            floor = far[value] / 2 if np.isfinite(far[value]) else -float(np.finfo(np.float32).max)
            masks[str(value.name)] = Mask(floor, MASK_GAP if axis is None else SCORE_GAP, axis)
    return masks


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
    found = [far[value] if value in far else _far_constant(value) for value in parts if value is not None]
    return max((value for value in found if value is not None), default=None)


def _far_constant(value: ir.Value | None) -> float | None:
    if value is None or value.dtype is not ir.DataType.FLOAT:
        return None
    array = constant_array(value)
    if array is None or array.size == 0:
        return None
    hidden = array[array <= FAR]
    return float(hidden.max()) if hidden.size else None


def _reaches(node: ir.Node, axes: Mapping[ir.Value, int | None]) -> bool:
    """Whether what a node makes of a mask ends in a Softmax."""
    return node.op_type == "Softmax" or (len(node.outputs) > 0 and node.outputs[0] in axes)


_SIZES = frozenset({"Shape", "Size"})


def mask_inputs(graph: ir.Graph) -> list[str]:
    """The model's inputs that a mask is made of; what only gives it a size is none."""
    masks = masked_tensors(graph)
    stack: list[ir.Value | None] = []
    for node in graph:
        mask = masks.get(str(node.outputs[0].name)) if node.outputs else None
        if mask is not None and node.op_type == "Where":
            stack.append(node.inputs[0])
        elif mask is not None and mask.axis is None:
            stack += node.inputs
    found: dict[ir.Value, None] = {}
    while stack:
        value = stack.pop()
        maker = None if value is None else value.producer()
        if value is None or value in found:
            continue
        found[value] = None
        stack += [] if maker is None or maker.op_type in _SIZES else maker.inputs
    return [str(value.name) for value in graph.inputs if value in found]
