"""Division by the Euclidean norm as one node."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from roundel.passes.base import Pass
from roundel.passes.moments import squared
from roundel.passes.rewriting import (
    Editor,
    get_float,
    input_at,
    is_op,
    is_private,
    operands,
    producer,
    reduced_axes,
    same_rank,
    scalar,
    static_dims,
)

# Norms below the clamp are the only ones for which the fused operator differs. Up to this size of the
# clamp such vectors are zero for any practical purpose. PyTorch clamps the norm at 1e-12, TensorFlow its
# square at 1e-12.
_LARGEST_CLAMP = 1.001e-6

_NO_MAXIMUM = 1e30  # exporters write the largest float for "no maximum"

_TYPES = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE})


class FuseL2Norm(Pass):
    """Fuses `x / max(norm(x), tiny)` over one axis into LpNormalization with p = 2.

    Tolerance: rounding, about 1e-6, for vectors whose norm exceeds the clamp; a zero vector stays zero.
    Vectors that are shorter than the clamp but not zero come out longer than before, so the fusion is
    done only where the clamp on the norm is at most 1e-6. An epsilon that is added to the norm, rather
    than clamping it, and a norm without any clamp, which would divide zero by zero, are left alone.
    """

    name: ClassVar[str] = "fuse l2 norm"
    reads_shapes: ClassVar[bool] = True

    def __call__(self, model: ir.Model) -> int:
        editor = Editor(model)
        # A fusion removes nodes further on, hence the snapshot.
        nodes = [node for node in model.graph if is_op(node, "Div", "Mul")]
        return sum(_fuse(editor, node) for node in nodes if node.graph is model.graph)


@dataclass(frozen=True, slots=True)
class _Norm:
    """A clamped norm: of what, along which axis, at least how much."""

    source: ir.Value
    axis: int
    clamp: float
    nodes: frozenset[ir.Node]

    def joined(self, *nodes: ir.Node) -> _Norm:
        return _Norm(self.source, self.axis, self.clamp, self.nodes | set(nodes))

    def clamped(self, clamp: float, node: ir.Node) -> _Norm:
        return _Norm(self.source, self.axis, max(self.clamp, clamp), self.nodes | {node})


_Matcher = Callable[[ir.Value | None], _Norm | None]


def _fuse(editor: Editor, last: ir.Node) -> bool:
    found = _quotient(last)
    if found is None or not 0 < found.clamp <= _LARGEST_CLAMP or found.source.dtype not in _TYPES:
        return False
    nodes = found.nodes | {last}
    if not same_rank(found.source, last.outputs[0]) or not is_private(nodes, last):
        return False
    editor.replace(last, "LpNormalization", [found.source], {"axis": found.axis, "p": 2})
    editor.drop_all(nodes - {last})
    return True


def _quotient(last: ir.Node) -> _Norm | None:
    if last.op_type == "Div":
        found = _expanded(input_at(last, 1), input_at(last, 0))
        return found if found is not None and found.source is input_at(last, 0) else None
    for value, other in operands(last):
        inverse = producer(other, "Reciprocal")
        found = None if inverse is None else _expanded(inverse.inputs[0], value)
        if inverse is not None and found is not None and found.source is value:
            return found.joined(inverse)
    return None


def _expanded(value: ir.Value | None, like: ir.Value | None) -> _Norm | None:
    """A clamped norm, perhaps expanded to the shape of the vector."""
    node = producer(value, "Expand")
    if node is None:
        return _clamped(value, _norm)
    shape = producer(input_at(node, 1), "Shape")
    same = shape is not None and shape.inputs[0] is like and not shape.attributes
    sizes = static_dims(like)
    if not same and (sizes is None or sizes != static_dims(node.outputs[0])):
        return None
    found = _clamped(input_at(node, 0), _norm)
    return None if found is None else found.joined(node)


def _norm(value: ir.Value | None) -> _Norm | None:
    """Match ReduceL2, or the root of a sum of squares that may be clamped inside."""
    node = producer(value, "ReduceL2", "Sqrt")
    if node is None or node.op_type == "ReduceL2":
        return _reduction(node)
    inside = _clamped(input_at(node, 0), _sum_of_squares)
    if inside is None:
        return None
    return _Norm(inside.source, inside.axis, math.sqrt(inside.clamp), inside.nodes | {node})


def _sum_of_squares(value: ir.Value | None) -> _Norm | None:
    node = producer(value, "ReduceSum", "ReduceSumSquare")
    if node is None or node.op_type == "ReduceSumSquare":
        return _reduction(node)
    root = squared(input_at(node, 0))
    if root is None:
        return None
    found = _reduction(node)
    if found is None:
        return None
    return _Norm(root[0], found.axis, 0.0, found.nodes | root[1])


def _reduction(node: ir.Node | None) -> _Norm | None:
    source = None if node is None else input_at(node, 0)
    if node is None or source is None or source.shape is None:
        return None
    axes = reduced_axes(node, len(source.shape))
    return _Norm(source, axes[0], 0.0, frozenset({node})) if axes is not None and len(axes) == 1 else None


def _clamped(value: ir.Value | None, inner: _Matcher) -> _Norm | None:
    """What `inner` matches, perhaps behind Max or Clip from below."""
    node = producer(value, "Max", "Clip")
    if node is None:
        return inner(value)
    if node.op_type == "Max":
        pairs = [(a, scalar(b)) for a, b in operands(node)]
    else:
        pairs = [(node.inputs[0], _lower_bound(node))] if node.inputs[0] is not None else []
    for body, clamp in pairs:
        found = inner(body) if clamp is not None and clamp >= 0 else None
        if found is not None and clamp is not None:
            return found.clamped(clamp, node)
    return None


def _lower_bound(clip: ir.Node) -> float | None:
    """The minimum of a Clip without a maximum."""
    upper = input_at(clip, 2)
    if upper is not None and (scalar(upper) or 0.0) < _NO_MAXIMUM:
        return None
    if get_float(clip, "max", math.inf) < _NO_MAXIMUM:
        return None
    lower = input_at(clip, 1)
    return scalar(lower) if lower is not None else get_float(clip, "min", -1.0)
