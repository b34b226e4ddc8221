"""Norms over the last axis, as one operator or spelled out, with the constants that scale and shift them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.model.edit import Editor
from roundel.model.graph import attribute_int, dims, input_at, is_op, is_private, only_reader, real_constant
from roundel.passes.moments import over_root, padded_square

NORM_OPERATORS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")

Slot = tuple[ir.Node, int]


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """x / size(x) * scale + shift.

    Attributes:
        source: x.
        output: the result.
        nodes: everything between the two.
        centered: whether the mean of x is subtracted first (LayerNorm; RMSNorm does not).
        scale: the constant that multiplies, where there is one.
        shift: the constant that is added, where there is one.
    """

    source: ir.Value
    output: ir.Value
    nodes: frozenset[ir.Node]
    centered: bool
    scale: Slot | None
    shift: Slot | None

    def array(self, slot: Slot | None) -> NDArray[Any] | None:
        """The constant in a slot."""
        return None if slot is None else real_constant(input_at(*slot))

    def clear(self, editor: Editor) -> None:
        """Scale by 1 and shift by nothing, without nodes that would do only that."""
        for slot in (self.scale, self.shift):
            if slot is None:
                continue
            node, index = slot
            if is_op(node, "Mul", "Add"):
                computed = node.inputs[1 - index]
                assert computed is not None
                editor.take_over(node.outputs[0], computed)
                editor.drop(node)
            elif index == 2:
                node.resize_inputs(2)
            else:
                old = self.array(slot)
                assert old is not None
                editor.set_constant(node, index, np.ones_like(old), "scale")


def find_norms(graph: ir.Graph) -> tuple[Norm, ...]:
    """All norms over the last axis whose constants are known, in graph order."""
    found = []
    for node in graph:
        norm = read_norm(node) or _spelled_out(node)
        if norm is not None and not any(out.uses() or out.is_graph_output() for out in node.outputs[1:]):
            found.append(norm)
    return tuple(found)


def read_norm(node: ir.Node) -> Norm | None:
    """A norm as one operator."""
    source = input_at(node, 0)
    known = dims(source)
    if not is_op(node, *NORM_OPERATORS) or source is None or not known:
        return None
    if attribute_int(node, "axis", -1) not in (-1, len(known) - 1):
        return None
    scale, shift = real_constant(input_at(node, 1)), real_constant(input_at(node, 2))
    if scale is None or scale.shape != known[-1:] or (shift is None and input_at(node, 2) is not None):
        return None
    if shift is not None and shift.shape != scale.shape:
        return None
    return Norm(
        source=source,
        output=node.outputs[0],
        nodes=frozenset({node}),
        centered=node.op_type == "LayerNormalization",
        scale=(node, 1),
        shift=None if shift is None else (node, 2),
    )


def _spelled_out(core: ir.Node) -> Norm | None:
    """x / sqrt(mean(x * x) + epsilon), then a Mul and an Add with constants."""
    found = next((root for value, root in over_root(core, padded_square) if root.source is value), None)
    known = None if found is None else dims(found.source)
    if found is None or not known or found.axes != (len(known) - 1,):
        return None
    scale = _constant_behind(core.outputs[0], "Mul", known[-1])
    last = core if scale is None else scale[0]
    shift = _constant_behind(last.outputs[0], "Add", known[-1])
    last = last if shift is None else shift[0]
    whole = found.nodes | {core} | {slot[0] for slot in (scale, shift) if slot is not None}
    if not is_private(whole, last):
        return None
    return Norm(found.source, last.outputs[0], frozenset(whole), False, scale, shift)


def _constant_behind(value: ir.Value, op_type: str, width: int | None) -> Slot | None:
    """The constant, one number for each place of the last axis, that the one reader applies."""
    reader = only_reader(value)
    if reader is None or not is_op(reader, op_type):
        return None
    for index, other in enumerate(reader.inputs):
        array = real_constant(other)
        if array is not None and array.size == width and array.shape[-1:] == (width,):
            return reader, index
    return None
