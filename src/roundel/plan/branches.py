"""Small branches of an aligned Concat: tensors that its scale would ruin for their other readers.

The NPU's Concat copies codes, so its inputs take its scale. A branch whose values are far smaller than the
others' loses most of its bits there, which nobody can help; but it must not lose them for whoever else reads
it. Such a branch keeps its own scale, and the Concat alone reads it through a second pair, in the Concat's.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from roundel.plan.adjust import stored_input, stored_output
from roundel.plan.types import Observed, QuantPlan, Role, Shared, Source, TensorPlan
from roundel.targets.operators import AVERAGE_POOLS, FUSING_CONSUMERS, Style, operator_set
from roundel.types import QParams, Scheme

FAR_BELOW = 4.0
"""Two bits: what a Concat may cost its inputs' other readers before a pair of their own is worth it."""

_MOVING = FUSING_CONSUMERS | AVERAGE_POOLS | {"Slice", "Pad"}


@dataclass(frozen=True, slots=True)
class Branch:
    """An input of aligned Concats that could have a scale of its own.

    Attributes:
        tensor: its name.
        members: all tensors that share its scale for other reasons than these Concats.
        leaders: those of them whose statistics would give the scale.
        joins: the Concats' names, each with the stored tensor that holds its result.
    """

    tensor: str
    members: frozenset[str]
    leaders: tuple[str, ...]
    joins: Mapping[str, str]


def branches(graph: ir.Graph, plan: QuantPlan) -> Iterator[Branch]:
    """The tensors that aligned Concats and others read, in graph order."""
    ties = list(_ties(graph, plan))
    values = {str(value.name): value for node in graph for value in node.inputs if value is not None}
    seen: set[str] = set()
    for tensor in plan.tensors:
        joins = {str(n.name): out for n, name, out in ties if name == tensor and n.op_type == "Concat"}
        if not joins or tensor in seen or tensor not in values:
            continue
        left = [(n, a, b) for n, a, b in ties if not (a == tensor and str(n.name) in joins)]
        members = _connected(tensor, left)
        inside = {str(node.name) for node, one, _ in left if one in members} | joins.keys()
        readers = {str(n.name) for m in members & values.keys() for n in values[m].consumers()}
        if members.isdisjoint(joins.values()) and readers - inside:
            seen |= members
            own = tuple(name for name in plan.leaders(tensor) if name in members) or (tensor,)
            yield Branch(tensor, members, own, joins)


def with_own_scales(
    graph: ir.Graph, plan: QuantPlan, scale_of: Callable[[TensorPlan], QParams], known: Container[str]
) -> tuple[QuantPlan, dict[tuple[str, str], str]]:
    """The plan with small branches apart, and the tensor whose scale each Concat reads each of them in.

    Args:
        graph: of the prepared model.
        plan: as the hardware's alignment has it.
        scale_of: the scale that a tensor would get by itself, or with the tensors that it shares one with.
        known: the tensors with statistics.
    """
    reads: dict[tuple[str, str], str] = {}
    for branch in branches(graph, plan):
        if not all(name in known for name in branch.leaders):
            continue
        apart = _apart(plan, branch)
        tensor = branch.tensor
        if scale_of(apart[tensor]).scale * FAR_BELOW <= scale_of(plan.tensors[tensor]).scale:
            plan = replace(plan, tensors={**plan.tensors, **apart})
            reads |= {(tensor, node): out for node, out in branch.joins.items()}
    return plan, reads


def _ties(graph: ir.Graph, plan: QuantPlan) -> Iterator[tuple[ir.Node, str, str]]:
    """The nodes for whose sake an input and an output share a scale."""
    table = operator_set("extended")
    for node in graph:
        rule = table.get(node.op_type)
        moves = node.op_type in _MOVING or (rule is not None and rule.style is not Style.OWN)
        if not plan.nodes[str(node.name)].quantized or not (moves or node.op_type == "Concat"):
            continue
        made = {stored_output(node, plan.tensors), *(str(v.name) for v in node.outputs)}
        given = node.inputs if node.op_type == "Concat" else node.inputs[:1]
        for name in (stored_input(value, plan.tensors) for value in given):
            for out in made:
                if name is not None and out in plan.tensors and _together(plan, name, str(out)):
                    yield node, name, str(out)


def _together(plan: QuantPlan, one: str, other: str) -> bool:
    tensors = (plan.tensors[one], plan.tensors[other])
    flows = all(t.role is Role.ACTIVATION and isinstance(t.scheme, Scheme) for t in tensors)
    return flows and one != other and plan.leaders(one) == plan.leaders(other)


def _connected(start: str, ties: Iterable[tuple[ir.Node, str, str]]) -> frozenset[str]:
    found, before = {start}, 0
    pairs = [(one, other) for _, one, other in ties]
    while len(found) > before:
        before = len(found)
        for pair in pairs:
            if not found.isdisjoint(pair):
                found.update(pair)
    return frozenset(found)


def _apart(plan: QuantPlan, branch: Branch) -> dict[str, TensorPlan]:
    """The plans of the whole group, in two groups."""
    leaders = plan.leaders(branch.tensor)
    rest = tuple(name for name in leaders if name not in branch.members)
    why = f"far below the range of {', '.join(branch.joins)}, which reads it through a pair of its own"
    found = {}
    for name, tensor in plan.tensors.items():
        if plan.leaders(name) != leaders or not isinstance(tensor.scheme, Scheme):
            continue
        inside = name in branch.members
        source: Source = Shared(branch.leaders if inside else rest)
        if source == Shared((name,)):
            source = Observed()
        reason = why if name == branch.tensor else tensor.reason
        found[name] = replace(tensor, source=source, reason=reason)
    return found
