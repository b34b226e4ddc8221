"""Parts that stay in float for their place: heads, spectrograms, delicate arithmetic, carriers to float.

A head turns the last layers' results into boxes and scores, and quantizes badly. Boxes in pixels and scores
in 0..1 in one tensor leave the scores no code but zero; a distribution over distances (DFL) is summed with
weights 0, 1, 2 …; grids and strides multiply small errors by the size of the image. All of it is a handful of
cheap nodes behind the last layer with weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.model.graph import (
    around,
    attribute_int,
    attribute_ints,
    constant_array,
    downstream,
    is_constant,
    is_float32,
    upstream,
)
from roundel.plain import listed
from roundel.plan.delicate import EXPONENTIAL, LOGARITHM, ONE_NUMBER, VARIANCE, find_delicate
from roundel.plan.types import NodePlan
from roundel.recipe.settings import Recipe
from roundel.targets.operators import OPERATORS, Trait, ops_with

_HEAVY = ops_with(Trait.LAYER | Trait.RECURRENT)
_SHAPERS = ops_with(Trait.SHAPES)
MOVERS = ops_with(Trait.SHAPES | Trait.SELECTS | Trait.CASTS)  # operators that change no value
_PROBABILITIES = frozenset(op for op, row in OPERATORS.items() if row.bounds == (0, 1))
_FEWEST_BINS, _MOST_BINS = 4, 128


def find_detection_head(graph: ir.Graph) -> set[ir.Node]:
    """The nodes behind the last layers that hang together with a sign of boxes and scores; often none."""
    tail = set(tail_of(graph))
    return around(graph, _signs(tail), tail) if len(tail) < len(graph) else set()


def tail_of(graph: ir.Graph) -> list[ir.Node]:
    """Nodes behind the last layer with weights, in graph order; a DFL's own Conv is no such layer."""
    before = upstream(graph, (n for n in graph if n.op_type in _HEAVY and not sums_distribution(n)))
    return [node for node in graph if node not in before]


def sums_distribution(node: ir.Node) -> bool:
    """Whether this is a Conv, MatMul or Mul with weights 0, 1, 2 … behind a Softmax."""
    if node.op_type not in ("Conv", "MatMul", "Mul", "Gemm"):
        return False
    makers = [maker_behind(value, _SHAPERS) for value in node.inputs]
    behind = any(maker is not None and maker.op_type == "Softmax" for maker in makers)
    return behind and any(_counts(value) for value in node.inputs)  # in this order: few weights are read


def joins_scores(node: ir.Node) -> bool:
    """Whether a Concat joins probabilities with something else that was computed."""
    if node.op_type != "Concat":
        return False
    computed = [value for value in node.inputs if value is not None and not is_constant(value)]
    sure = [_is_probability(value) for value in computed]
    return any(sure) and not all(sure)


@dataclass(frozen=True, slots=True)
class Joint:
    """Where a head has joined scores with other values: an axis, and the places on it."""

    axis: int
    places: tuple[int, ...]

    def parts(self, array: NDArray[Any]) -> list[NDArray[Any]]:
        """The array cut there; whole where it has another shape than was expected."""
        if array.ndim <= self.axis or array.shape[self.axis] <= self.places[-1]:
            return [array]
        return np.split(array, self.places, axis=self.axis)


def paired_parts(
    name: str, whole: NDArray[Any], other: NDArray[Any], joints: Mapping[str, Joint]
) -> Iterator[tuple[str, NDArray[Any], NDArray[Any]]]:
    """The parts of two arrays of one shape, each with a name such as 'boxes[:, 0:4]'; often just the two."""
    joint = joints.get(name)
    pieces = [whole] if joint is None else joint.parts(whole)
    if joint is None or len(pieces) == 1:
        yield name, whole, other
        return
    start = 0
    for one, two in zip(pieces, joint.parts(other), strict=True):
        end = start + one.shape[joint.axis]
        yield f"{name}[{', '.join([':'] * joint.axis + [f'{start}:{end}'])}]", one, two
        start = end


def joined_outputs(graph: ir.Graph) -> dict[str, Joint]:
    """The graph's outputs in which scores are joined with other values."""
    found = {str(value.name): _joint(value) for value in graph.outputs}
    return {name: joint for name, joint in found.items() if joint is not None}


def maker_behind(value: ir.Value | None, movers: frozenset[str] = MOVERS) -> ir.Node | None:
    """The node that computed what a value holds, looking back through operators that only move values."""
    node = None if value is None else value.producer()
    while node is not None and node.op_type in movers:
        source = node.inputs[0]
        node = None if source is None else source.producer()
    return node


def _joint(value: ir.Value) -> Joint | None:
    node, turns = value.producer(), list[tuple[int, ...]]()
    while node is not None and node.op_type in ("Transpose", "Identity"):
        if node.op_type == "Transpose":
            turns.append(attribute_ints(node, "perm") or ())
        source = node.inputs[0]
        node = None if source is None else source.producer()
    if node is None or not joins_scores(node) or node.outputs[0].shape is None:
        return None
    axis = attribute_int(node, "axis", 0) % len(node.outputs[0].shape)
    shapes = [None if part is None else part.shape for part in node.inputs]
    sizes = [size for shape in shapes if shape is not None and isinstance(size := shape[axis], int)]
    if len(sizes) < len(node.inputs):
        return None
    for order in reversed(turns):
        if axis not in order:
            return None
        axis = order.index(axis)
    return Joint(axis, tuple(np.cumsum(sizes[:-1]).tolist()))


def _signs(tail: set[ir.Node]) -> Iterator[ir.Node]:
    for node in tail:
        if node.op_type == "NonMaxSuppression" or sums_distribution(node) or joins_scores(node):
            yield node


def _is_probability(value: ir.Value | None, factors: bool = True) -> bool:
    node = maker_behind(value)
    if node is None:
        return False
    if node.op_type == "Mul" and factors:  # an object's score times its class's
        return all(_is_probability(factor, factors=False) for factor in node.inputs)
    return node.op_type in _PROBABILITIES


def _counts(value: ir.Value | None) -> bool:
    array = constant_array(value) if is_constant(value) else None
    if array is None or not _FEWEST_BINS <= array.size <= _MOST_BINS:
        return False
    return bool(np.array_equal(array.ravel(), np.arange(array.size)))


_TRANSFORMS = frozenset({"Conv", "MatMul", "Gemm", "STFT", "DFT"})
# A network has begun where one of these is.
_LEARNED = ops_with(Trait.NONLINEAR | Trait.NORM | Trait.RECURRENT | Trait.ATTENTION | Trait.MAXIMUM)


def find_front_end(graph: ir.Graph) -> set[ir.Node]:
    """The nodes up to each Log that only a fixed transform leads to and a network follows."""
    learned = downstream(graph, (node for node in graph if node.op_type in _LEARNED))
    behind = downstream(graph, (node for node in graph if node.op_type == "Log"))
    followed = upstream(graph, (node for node in behind if node.op_type in _HEAVY))
    inside = upstream(graph, (n for n in followed - learned if n.op_type == "Log"))
    return inside if any(node.op_type in _TRANSFORMS for node in inside) else set()


FRONT_END = "computes a spectrogram: the Log behind it magnifies errors of small values"
HEAD = "decodes detections: one scale for boxes and scores leaves the scores zero"

_TOLD = {
    FRONT_END: "{} nodes that compute a spectrogram stay in float: the Log behind them magnifies errors of "
    "small values (-s improve.front_end=false quantizes them)",
    HEAD: "{} nodes of the detection head stay in float: one scale for boxes and scores leaves the scores "
    "zero (-s improve.detection_head=false quantizes them)",
}


def float_part_nodes(graph: ir.Graph, recipe: Recipe) -> dict[str, str]:
    """For each node that stays in float for its place in the model, the reason."""
    if not recipe.keeps_float_parts:
        return {}
    found: dict[str, str] = {}
    if recipe.improve.front_end:
        found |= {str(node.name): FRONT_END for node in find_front_end(graph)}
    if recipe.improve.detection_head:
        found |= {str(node.name): HEAD for node in find_detection_head(graph)}
    return found


def delicate_nodes(graph: ir.Graph, recipe: Recipe) -> dict[str, str]:
    """For each node of delicate arithmetic the reason why it stays in float, should it not do so anyway."""
    if not (recipe.keeps_float_parts and recipe.improve.delicate):
        return {}
    return {str(node.name): why for node, why in find_delicate(graph).items()}


def float_part_notes(nodes: Mapping[str, NodePlan]) -> tuple[str, ...]:
    """What the user is told of them."""
    counts = {reason: sum(node.reason == reason for node in nodes.values()) for reason in _TOLD}
    told = [_TOLD[reason].format(count) for reason, count in counts.items() if count]
    return (*told, *_delicate_note(nodes))


_DELICATE = {
    VARIANCE: "of variances and norms",
    LOGARITHM: "in front of a Log",
    EXPONENTIAL: "around an Exp",
    ONE_NUMBER: "around a single number",
}
_NAMED = 2


def _delicate_note(nodes: Mapping[str, NodePlan]) -> Iterator[str]:
    groups = []
    for reason, what in _DELICATE.items():
        names = [f"'{node.name}'" for node in nodes.values() if node.reason == reason]
        if names:
            groups.append(f"{len(names)} {what} ({listed(names, _NAMED)})")
    if groups:
        switch = "-s improve.delicate=false quantizes them"
        yield f"nodes of delicate arithmetic stay in float: {', '.join(groups)} ({switch})"


# Nodes that only carry values to nodes that stay in float: a Q/DQ pair there rounds, and nothing gains.

CARRIES = "only carries values to nodes that stay in float"

_CARRIERS = {"Pad"} | ops_with(
    Trait.SHAPES | Trait.REARRANGES | Trait.SELECTS | Trait.REPEATS | Trait.JOINS | Trait.CASTS
)


def spare_carriers(
    graph: ir.Graph, plans: Mapping[str, NodePlan], named: Collection[str], exact: Collection[str]
) -> dict[str, NodePlan]:
    """The verdicts, with carriers left in float whose values reach no quantized node.

    Two kinds are quantized as ever. What carries codes on as they are costs nothing behind a quantized node.
    And what leads to an output of the model is spared only behind a node that stays in float itself.

    Args:
        graph: of the model.
        plans: a verdict for each node.
        named: nodes that the user has asked for by name.
        exact: operator types whose output takes the scale of their input.
    """
    idle = _idle(graph, plans, named)
    spared = dict(plans)
    for node in graph:
        if node not in idle:
            continue
        makers = {value.producer() for value in node.inputs if value is not None and not is_constant(value)}
        quantized = [maker is not None and spared[str(maker.name)].quantized for maker in makers]
        codes = any(quantized) and node.op_type in exact
        from_outside = None in makers or any(quantized)
        if not codes and not (idle[node] and from_outside):
            name = str(node.name)
            spared[name] = replace(spared[name], quantized=False, reason=CARRIES)
    return spared


def _idle(graph: ir.Graph, plans: Mapping[str, NodePlan], named: Collection[str]) -> dict[ir.Node, bool]:
    """The carriers that lead to no quantized node, and whether one of the model's outputs is behind each."""
    found: dict[ir.Node, bool] = {}
    for node in reversed(graph):
        verdict = plans[str(node.name)]
        if node.op_type not in _CARRIERS or not verdict.quantized or verdict.name in named:
            continue
        if not any(map(is_float32, node.outputs)):
            continue
        after = [reader for value in node.outputs for reader in value.consumers()]
        leads_out = any(v.is_graph_output() for v in node.outputs) or any(found.get(r, False) for r in after)
        if (after or leads_out) and all(reader in found or _in_float(reader, plans) for reader in after):
            found[node] = leads_out
    return found


def _in_float(node: ir.Node, plans: Mapping[str, NodePlan]) -> bool:
    """Whether a reader stays in float; what is inside a body of If, Loop or Scan does."""
    verdict = plans.get(str(node.name))
    return verdict is None or not verdict.quantized
