"""Delicate arithmetic: a few cheap nodes in which eight bits of a tensor are worth far fewer of the result.

A square takes twice the range of what was squared, so that a variance in eight bits holds four of a
deviation, and the root or the reciprocal behind it magnifies what is left near zero; so does a logarithm. An
exponential turns a step of its operand into a factor. One number that all values of a tensor are divided by,
or shifted by, moves all of them at once when it is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import onnx_ir as ir

from roundel.model.graph import (
    constant_scalar,
    input_at,
    is_constant,
    is_float32,
    operands,
    readers,
    static_shape,
)
from roundel.targets.operators import LAYERS, Trait, ops_with

VARIANCE = "takes part in a variance or a norm that is written out: its square holds half the bits"
LOGARITHM = "makes what a Log reads, which magnifies errors of small values"
EXPONENTIAL = "stands around an Exp, which turns a step into a factor"
ONE_NUMBER = "stands around one number computed from the input, whose rounding moves all values at once"

_MOVERS = ops_with(Trait.SHAPES | Trait.SELECTS | Trait.REPEATS | Trait.CASTS)
_ELEMENTWISE = ops_with(Trait.ELEMENTWISE)
_STEPS = _MOVERS | _ELEMENTWISE | {"Clip", "Abs", "Neg", "Sum"}
_ONWARD = _STEPS | {"Reciprocal", "Sqrt"}
_SCALINGS = _MOVERS | {"Mul", "Div"}
_MEANS = frozenset({"ReduceMean", "ReduceSum", "ReduceSumSquare", "GlobalAveragePool"})
_REDUCTIONS = _MEANS | {"ReduceL1", "ReduceL2", "ReduceMax", "ReduceMin"}
_BENT = ops_with(Trait.NONLINEAR)
_ROOTS = (0.5, -0.5)
Found = set[ir.Node]


def find_delicate(graph: ir.Graph) -> dict[ir.Node, str]:
    """The nodes of delicate arithmetic, each with the first reason that applies; often none."""
    seeds: tuple[tuple[str, Callable[[ir.Node], Found]], ...] = (
        (VARIANCE, _around_root),
        (LOGARITHM, _before_log),
        (EXPONENTIAL, _around_exponential),
        (ONE_NUMBER, _around_number),
    )
    found: dict[ir.Node, str] = {}
    for reason, around in seeds:
        for node in graph:
            for member in around(node):
                found.setdefault(member, reason)
    return found


# A variance, or another sum of squares, in front of a root or a reciprocal.


def _around_root(root: ir.Node) -> Found:
    if not _is_root(root):
        return set()
    squares, means = set[ir.Node](), set[ir.Node]()
    found = _statistic(root, squares, means)
    if root.op_type == "Reciprocal" and not (squares and means):
        return set()  # of something else, a sigmoid's 1 + exp(-x) say
    if root.op_type == "ReduceL2":
        means.add(root)
    return found | (_divided(root) if means else set())


def _is_root(node: ir.Node) -> bool:
    if node.op_type == "Pow":
        return constant_scalar(input_at(node, 1)) in _ROOTS
    return node.op_type in ("Sqrt", "Reciprocal", "ReduceL2")


def _statistic(root: ir.Node, squares: Found, means: Found) -> Found:
    """The nodes from squares and means up to a root; the sets get those that it begins with."""
    found, stack = {root}, _makers(root)
    while stack:
        node = stack.pop()
        if node in found:
            continue
        if _is_square(node):
            squares.add(node)
            found |= {node, *_scaled_mean(node.inputs[0], means)}
        elif node.op_type in _MEANS:
            means.add(node)
            found |= {node, *_squared(node.inputs[0], squares, means)}
            squares.update({node} if node.op_type == "ReduceSumSquare" else ())
        elif node.op_type in _STEPS:
            found.add(node)
            stack += _makers(node)
    return _behind(squares | means, found)


def _squared(value: ir.Value | None, squares: Found, means: Found) -> Found:
    """The square that a mean is taken of, and the subtraction of the mean in it."""
    square = _maker(value)
    if square is None or not _is_square(square):
        return set()
    squares.add(square)
    return {square, *_centring(square.inputs[0], means)}


def _centring(value: ir.Value | None, means: Found) -> Found:
    """The subtraction of a mean that makes a value, with what makes the mean."""
    node = _maker(value)
    if node is None or node.op_type not in ("Sub", "Add"):
        return set()
    for _, other in operands(node):
        if mean := _scaled_mean(other, means):
            return {node, *mean}
    return set()


def _scaled_mean(value: ir.Value | None, means: Found) -> Found:
    """The nodes from a mean to a value that is nothing else than that mean, or a multiple; none otherwise."""
    found, node = set[ir.Node](), _maker(value)
    while node is not None and node.op_type in _SCALINGS:
        found.add(node)
        made = _makers(node)
        node = made[0] if len(made) == 1 else None
    if node is None or node.op_type not in _MEANS:
        return set()
    means.add(node)
    return {*found, node}


def _behind(starts: Found, within: Found) -> Found:
    """Those of the nodes that these lead to: another operand on the way has nothing to do with them."""
    kept, stack = set[ir.Node](), [node for node in starts if node in within]
    while stack:
        node = stack.pop()
        if node not in kept:
            kept.add(node)
            stack += [after for after in node.successors() if after in within]
    return kept


def _computing(found: Found) -> Found:
    """Without what only carries a stored tensor to the first node that computes."""
    return _behind({node for node in found if node.op_type not in _MOVERS}, found)


def _divided(root: ir.Node) -> Found:
    """From a root to what is divided by it, or multiplied by its reciprocal, and the subtraction in front."""
    found, joints = _to_joints(root, _always)
    for joint in joints:
        for value in joint.inputs:
            found |= _centring(value, set())
    return found


# A logarithm, an exponential, a single number.


def _before_log(log: ir.Node) -> Found:
    """What makes the operand: arithmetic, and the last operator before it; behind a layer, squares only."""
    if log.op_type != "Log":
        return set()
    found, stack = {log}, _makers(log)
    while stack:
        node = stack.pop()
        if node in found:
            continue
        if node.op_type in LAYERS:
            found |= {node, *_summed_squares(node)}
        elif node.op_type in _STEPS or _is_square(node):
            found.add(node)
            stack += [] if _is_square(node) else _makers(node)
        elif node.op_type in _BENT or node.op_type in _REDUCTIONS:
            found |= {node, *_squared(node.inputs[0], set(), set())}
    return _computing(found)


def _summed_squares(layer: ir.Node) -> Found:
    """The squares whose sums a layer computes, as a filter bank does; and the additions on the way."""
    found, squares, stack = set[ir.Node](), set[ir.Node](), _makers(layer)
    while stack:
        node = stack.pop()
        if node in found or not (_is_square(node) or node.op_type in _STEPS or node.op_type == "Sqrt"):
            continue
        found.add(node)
        if _is_square(node):
            squares.add(node)
        else:
            stack += _makers(node)
    return _behind(squares, found)


def _around_exponential(exp: ir.Node) -> Found:
    """The arithmetic in front of it, and what first reads its result; a layer's own result may be stored."""
    if exp.op_type != "Exp" or _is_activation(exp):
        return set()
    found, stack = {exp}, _makers(exp)
    while stack:
        node = stack.pop()
        if node not in found and node.op_type in _STEPS | _MEANS:
            found.add(node)
            stack += _makers(node)
    behind, _ = _to_joints(exp, _always)
    return _computing(found) | behind


def _is_activation(exp: ir.Node) -> bool:
    """Whether it is part of a Softmax, or of a sigmoid or an ELU, which add or take away a constant."""
    after = exp.outputs[0].consumers()
    if any(node.op_type == "ReduceSum" for node in after) and any(node.op_type == "Div" for node in after):
        return True
    shifts = [node for node in after if node.op_type in ("Add", "Sub")]
    return any(any(map(is_constant, node.inputs)) for node in shifts)


def _around_number(mean: ir.Node) -> Found:
    """From where a tensor becomes one number up to where that meets a tensor of more; none if it does not."""
    source = mean.inputs[0] if mean.inputs else None
    if mean.op_type not in _REDUCTIONS or _size(source) in (None, 1) or _size(mean.outputs[0]) != 1:
        return set()
    # Where it meets nothing, it is a result like any other.
    found, joints = _to_joints(mean, _is_number)
    larger = {node for node in joints if _size(node.outputs[0]) not in (None, 1)}
    return found | {mean} if larger else set()


# Walking.


def _to_joints(start: ir.Node, passes: Callable[[ir.Node], bool]) -> tuple[Found, Found]:
    """The nodes from one node to where its result first meets another computed tensor, and those joints."""
    seen, joints, stack = set[ir.Node](), set[ir.Node](), [start]
    while stack:
        for value in stack.pop().outputs:
            for node, _ in readers(value):
                if node in seen or node.graph is not start.graph:
                    continue
                if node.op_type in _ELEMENTWISE and len(_computed(node)) > 1:
                    joints.add(node)
                elif node.op_type in _ONWARD and passes(node):
                    seen.add(node)
                    stack.append(node)
    return _before(joints, seen) | joints, joints


def _before(ends: Iterable[ir.Node], within: Found) -> Found:
    """Those of the nodes that lead to these."""
    kept, stack = set[ir.Node](), [maker for node in ends for maker in _makers(node)]
    while stack:
        node = stack.pop()
        if node in within and node not in kept:
            kept.add(node)
            stack += _makers(node)
    return kept


def _is_square(node: ir.Node) -> bool:
    if node.op_type == "Mul":
        return node.inputs[0] is node.inputs[1]
    return node.op_type == "Pow" and constant_scalar(input_at(node, 1)) == 2


def _maker(value: ir.Value | None) -> ir.Node | None:
    """The node that makes a computed float tensor."""
    return value.producer() if value is not None and is_float32(value) and not is_constant(value) else None


def _makers(node: ir.Node) -> list[ir.Node]:
    return [maker for value in node.inputs if (maker := _maker(value)) is not None]


def _computed(node: ir.Node) -> set[ir.Value]:
    return {value for value in node.inputs if value is not None and not is_constant(value)}


def _always(node: ir.Node) -> bool:
    return True


def _is_number(node: ir.Node) -> bool:
    return _size(node.outputs[0]) == 1


def _size(value: ir.Value | None) -> int | None:
    shape = static_shape(value)
    if shape is None or not is_float32(value):
        return None
    return math.prod(shape)
