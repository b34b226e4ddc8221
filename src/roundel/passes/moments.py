"""Mean and variance, recognised in the primitive operators that exporters write for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import onnx_ir as ir

from roundel.model import graph

_FLOATS = frozenset({ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE})


@dataclass(frozen=True, slots=True)
class Pattern:
    """Operators that together compute one thing of a tensor.

    Attributes:
        source: the tensor.
        nodes: the operators.
        axes: those over which they reduce.
        least: what keeps a root or a norm from being zero: the epsilon added, or the clamp.
    """

    source: ir.Value
    nodes: frozenset[ir.Node]
    axes: tuple[int, ...] = ()
    least: float = 0.0

    def joined(self, *nodes: ir.Node) -> Pattern:
        """The same with more nodes that take part in it."""
        return replace(self, nodes=self.nodes | set(nodes))


Matcher = Callable[[ir.Value | None], Pattern | None]


def normalized(last: ir.Node) -> Pattern | None:
    """Match `(x - mean) / sqrt(variance + epsilon)`, whose last node is a Div or a Mul."""
    for value, found in over_root(last, padded_variance):
        center = centered(value)
        if center is not None and center.source is found.source and center.axes == found.axes:
            return found.joined(last, *center.nodes)
    return None


def over_root(last: ir.Node, inside: Matcher) -> Iterator[tuple[ir.Value, Pattern]]:
    """What a Div or a Mul may divide by a root of something, with the pattern of the root."""
    pairs: tuple[tuple[ir.Value, Pattern | None], ...] = ()
    if graph.is_op(last, "Div") and len(last.inputs) == 2 and last.inputs[0] is not None:
        pairs = ((last.inputs[0], deviation(last.inputs[1], inside)),)
    elif graph.is_op(last, "Mul"):
        pairs = tuple((value, reciprocal_deviation(other, inside)) for value, other in graph.operands(last))
    yield from ((value, found) for value, found in pairs if found is not None)


def centered(value: ir.Value | None) -> Pattern | None:
    """Match `x - mean(x)`."""
    node = graph.producer(value, "Sub")
    found = None if node is None else mean(graph.input_at(node, 1))
    if node is None or found is None or found.source is not node.inputs[0]:
        return None
    return found.joined(node)


def mean(value: ir.Value | None) -> Pattern | None:
    """Match ReduceMean with keepdims, or GlobalAveragePool."""
    node = graph.producer(value, "ReduceMean", "GlobalAveragePool")
    source = None if node is None else graph.input_at(node, 0)
    if node is None or source is None or source.shape is None:
        return None
    rank = len(source.shape)
    axes = tuple(range(2, rank)) if node.op_type == "GlobalAveragePool" else graph.reduced_axes(node, rank)
    return Pattern(source, frozenset({node}), axes) if axes else None


def padded_variance(value: ir.Value | None) -> Pattern | None:
    """Match `mean((x - mean(x)) ** 2) + epsilon`."""
    found = padded_square(value)
    base, casts = (None, ()) if found is None else _behind_cast(found.source)
    center = centered(base)
    if found is None or center is None or center.axes != found.axes:
        return None
    return replace(center.joined(*casts, *found.nodes), least=found.least)


def padded_square(value: ir.Value | None) -> Pattern | None:
    """Match `mean(x ** 2) + epsilon`."""
    add = graph.producer(value, "Add")
    pair = graph.with_number(add, "Add")
    averaged = None if pair is None else mean(pair[0])
    square = None if averaged is None else squared(averaged.source)
    if add is None or pair is None or averaged is None or square is None:
        return None
    return replace(square.joined(add, *averaged.nodes), axes=averaged.axes, least=pair[1])


def deviation(value: ir.Value | None, inside: Matcher = padded_variance) -> Pattern | None:
    """Match the root of a pattern, of `variance + epsilon` unless told otherwise."""
    value, casts = _behind_cast(value)
    node = graph.producer(value, "Sqrt", "Pow")
    if node is None or (node.op_type == "Pow" and graph.constant_scalar(graph.input_at(node, 1)) != 0.5):
        return None
    found = inside(node.inputs[0])
    return None if found is None else found.joined(node, *casts)


def reciprocal_deviation(value: ir.Value | None, inside: Matcher = padded_variance) -> Pattern | None:
    """Match 1 by such a root."""
    value, casts = _behind_cast(value)
    node = graph.producer(value, "Reciprocal", "Div", "Pow")
    if node is None:
        return None
    if node.op_type == "Pow":
        found = inside(node.inputs[0]) if graph.constant_scalar(graph.input_at(node, 1)) == -0.5 else None
    elif node.op_type == "Div" and graph.constant_scalar(graph.input_at(node, 0)) != 1.0:
        return None
    else:
        found = deviation(graph.input_at(node, 1 if node.op_type == "Div" else 0), inside)
    return None if found is None else found.joined(node, *casts)


def squared(value: ir.Value | None) -> Pattern | None:
    """Match `x ** 2` or `x * x`."""
    node = graph.producer(value, "Mul", "Pow")
    base = None if node is None else graph.input_at(node, 0)
    if node is None or base is None:
        return None
    other = graph.input_at(node, 1)
    matches = other is base if node.op_type == "Mul" else graph.constant_scalar(other) == 2.0
    return Pattern(base, frozenset({node})) if matches else None


def _behind_cast(value: ir.Value | None) -> tuple[ir.Value | None, tuple[ir.Node, ...]]:
    """Mixed-precision exports widen the square and narrow the root; the fused operators do so inside."""
    node = graph.producer(value, "Cast")
    if node is None or graph.attribute_int(node, "to", 0) not in _FLOATS:
        return value, ()
    return graph.input_at(node, 0), (node,)
