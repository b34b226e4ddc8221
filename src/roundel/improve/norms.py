"""Norms over the last axis, as one operator or spelled out, with the constants that scale and shift them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.model.edit import Editor
from roundel.model.graph import (
    attribute_int,
    constant_scalar,
    dims,
    input_at,
    is_op,
    is_private,
    only_reader,
    operands,
    producer,
    real_constant,
    with_number,
)
from roundel.passes.moments import mean, squared

_OPERATORS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")

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

    @property
    def name(self) -> str:
        """Of its last node."""
        node = self.output.producer()
        return str(node.name if node is not None else self.output.name)

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
        norm = _operator(node) if is_op(node, *_OPERATORS) else _spelled_out(node)
        if norm is not None:
            found.append(norm)
    return tuple(found)


def _operator(node: ir.Node) -> Norm | None:
    source = input_at(node, 0)
    known = dims(source)
    if source is None or not known or attribute_int(node, "axis", -1) not in (-1, len(known) - 1):
        return None
    scale, shift = real_constant(input_at(node, 1)), real_constant(input_at(node, 2))
    if scale is None or scale.shape != known[-1:] or (shift is None and input_at(node, 2) is not None):
        return None
    if any(out.uses() or out.is_graph_output() for out in node.outputs[1:]):
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
    found = _over_root(core)
    if found is None:
        return None
    source, nodes = found
    width = (dims(source) or (None,))[-1]
    scale = _constant_behind(core.outputs[0], "Mul", width)
    last = core if scale is None else scale[0]
    shift = _constant_behind(last.outputs[0], "Add", width)
    last = last if shift is None else shift[0]
    whole = nodes | {core} | {slot[0] for slot in (scale, shift) if slot is not None}
    if not is_private(whole, last):
        return None
    return Norm(source, last.outputs[0], frozenset(whole), False, scale, shift)


def _over_root(core: ir.Node) -> tuple[ir.Value, frozenset[ir.Node]] | None:
    pairs: tuple[tuple[ir.Value | None, ir.Value | None], ...] = ()
    if is_op(core, "Div"):
        pairs = ((input_at(core, 0), input_at(core, 1)),)
        match = _root
    elif is_op(core, "Mul"):
        pairs, match = operands(core), _reciprocal_root
    for value, other in pairs:
        found = match(other)
        if found is not None and found[0] is value:
            return found
    return None


def _root(value: ir.Value | None) -> tuple[ir.Value, frozenset[ir.Node]] | None:
    node = producer(value, "Sqrt", "Pow")
    if node is None or (node.op_type == "Pow" and constant_scalar(input_at(node, 1)) != 0.5):
        return None
    return _with(node, _mean_square(input_at(node, 0)))


def _reciprocal_root(value: ir.Value | None) -> tuple[ir.Value, frozenset[ir.Node]] | None:
    node = producer(value, "Reciprocal", "Div", "Pow")
    if node is None:
        return None
    if node.op_type == "Reciprocal":
        return _with(node, _root(input_at(node, 0)))
    if node.op_type == "Div":
        return _with(node, _root(input_at(node, 1))) if constant_scalar(input_at(node, 0)) == 1.0 else None
    return (
        _with(node, _mean_square(input_at(node, 0))) if constant_scalar(input_at(node, 1)) == -0.5 else None
    )


def _mean_square(value: ir.Value | None) -> tuple[ir.Value, frozenset[ir.Node]] | None:
    """mean(x * x) + epsilon over the last axis."""
    add = producer(value, "Add")
    pair = with_number(add, "Add")
    found = None if pair is None else mean(pair[0])
    if add is None or found is None:
        return None
    root = squared(found.source)
    if root is None or found.axes != (len(dims(found.source) or ()) - 1,):
        return None
    return root.source, root.nodes | found.nodes | {add}


def _with(
    node: ir.Node, found: tuple[ir.Value, frozenset[ir.Node]] | None
) -> tuple[ir.Value, frozenset[ir.Node]] | None:
    return None if found is None else (found[0], found[1] | {node})


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
