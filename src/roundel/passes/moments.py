"""Mean and variance, recognised in the primitive operators that exporters write for them."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from roundel.model.graph import (
    attribute_int,
    constant_scalar,
    input_at,
    is_op,
    operands,
    producer,
    reduced_axes,
    with_number,
)

_FLOATS = frozenset({ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE})


@dataclass(frozen=True, slots=True)
class Deviation:
    """The square root of variance plus epsilon, or its reciprocal."""

    source: ir.Value
    axes: tuple[int, ...]
    epsilon: float
    nodes: frozenset[ir.Node]

    def joined(self, *nodes: ir.Node) -> Deviation:
        """The same with more nodes that take part in it."""
        return Deviation(self.source, self.axes, self.epsilon, self.nodes | set(nodes))


def normalized(last: ir.Node) -> Deviation | None:
    """Match `(x - mean) / sqrt(variance + epsilon)`, whose last node is a Div or a Mul."""
    pairs: tuple[tuple[ir.Value, Deviation | None], ...] = ()
    if is_op(last, "Div") and len(last.inputs) == 2 and last.inputs[0] is not None:
        pairs = ((last.inputs[0], deviation(last.inputs[1])),)
    elif is_op(last, "Mul"):
        pairs = tuple((value, reciprocal_deviation(other)) for value, other in operands(last))
    for value, found in pairs:
        center = None if found is None else centered(value)
        if found is not None and center is not None and _agree(center, found):
            return found.joined(last, *center.nodes)
    return None


@dataclass(frozen=True, slots=True)
class Centered:
    """A tensor minus its mean."""

    source: ir.Value
    axes: tuple[int, ...]
    nodes: frozenset[ir.Node]


def centered(value: ir.Value | None) -> Centered | None:
    """Match `x - mean(x)`."""
    node = producer(value, "Sub")
    if node is None or len(node.inputs) != 2:
        return None
    found = mean(node.inputs[1])
    if found is None or found[1] is not node.inputs[0]:
        return None
    mean_node, source, axes = found
    return Centered(source, axes, frozenset({node, mean_node}))


def mean(value: ir.Value | None) -> tuple[ir.Node, ir.Value, tuple[int, ...]] | None:
    """Match ReduceMean with keepdims, or GlobalAveragePool: the node, its source and its axes."""
    node = producer(value, "ReduceMean", "GlobalAveragePool")
    source = None if node is None else input_at(node, 0)
    if node is None or source is None or source.shape is None:
        return None
    rank = len(source.shape)
    axes = tuple(range(2, rank)) if node.op_type == "GlobalAveragePool" else reduced_axes(node, rank)
    return (node, source, axes) if axes else None


def deviation(value: ir.Value | None) -> Deviation | None:
    """Match `sqrt(variance + epsilon)`."""
    value, casts = _behind_cast(value)
    node = producer(value, "Sqrt", "Pow")
    if node is None or (node.op_type == "Pow" and constant_scalar(input_at(node, 1)) != 0.5):
        return None
    found = _padded_variance(node.inputs[0])
    return None if found is None else found.joined(node, *casts)


def reciprocal_deviation(value: ir.Value | None) -> Deviation | None:
    """Match `1 / sqrt(variance + epsilon)`."""
    value, casts = _behind_cast(value)
    node = producer(value, "Reciprocal", "Div", "Pow")
    if node is None:
        return None
    if node.op_type == "Pow":
        found = _padded_variance(node.inputs[0]) if constant_scalar(input_at(node, 1)) == -0.5 else None
    elif node.op_type == "Div":
        found = deviation(input_at(node, 1)) if constant_scalar(input_at(node, 0)) == 1.0 else None
    else:
        found = deviation(node.inputs[0])
    return None if found is None else found.joined(node, *casts)


def _padded_variance(value: ir.Value | None) -> Deviation | None:
    """Match `mean((x - mean(x)) ** 2) + epsilon`."""
    add = producer(value, "Add")
    pair = with_number(add, "Add")
    found = None if pair is None else mean(pair[0])
    if add is None or pair is None or found is None:
        return None
    mean_node, squares, axes = found
    root = squared(squares)
    if root is None:
        return None
    base, square_nodes = root
    center_value, casts = _behind_cast(base)
    center = centered(center_value)
    if center is None or center.axes != axes:
        return None
    nodes = center.nodes | square_nodes | {add, mean_node, *casts}
    return Deviation(center.source, axes, pair[1], frozenset(nodes))


def squared(value: ir.Value | None) -> tuple[ir.Value, frozenset[ir.Node]] | None:
    """Match `x ** 2` or `x * x`: x and the node."""
    node = producer(value, "Mul", "Pow")
    base = None if node is None else input_at(node, 0)
    if node is None or base is None:
        return None
    if node.op_type == "Mul":
        matches = input_at(node, 1) is base
    else:
        matches = constant_scalar(input_at(node, 1)) == 2.0
    return (base, frozenset({node})) if matches else None


def _behind_cast(value: ir.Value | None) -> tuple[ir.Value | None, tuple[ir.Node, ...]]:
    """Mixed-precision exports widen the square and narrow the root; the fused operators do so inside."""
    node = producer(value, "Cast")
    if node is None or attribute_int(node, "to", 0) not in _FLOATS:
        return value, ()
    return input_at(node, 0), (node,)


def _agree(center: Centered, found: Deviation) -> bool:
    return center.source is found.source and center.axes == found.axes
