"""Where the quantizer's own saturation does the work of a Clip."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from roundel.errors import SelectionError
from roundel.model.graph import clip_bounds, only_reader, rank
from roundel.numerics.affine import code_limits
from roundel.plan.marking import Draft, channel_axis
from roundel.plan.select import matching_nodes, matching_tensors
from roundel.plan.types import Derived, Fixed, NodePlan, Observed, QuantPlan, Role, Shared, Source, TensorPlan
from roundel.recipe.settings import Npu, Override, Placement, Recipe, storage_of
from roundel.targets.operators import (
    AVERAGE_POOLS,
    FUSING_CLIP_BOUNDS,
    FUSING_CONSUMERS,
    FUSING_PRODUCERS,
    OpRule,
    Style,
    operator_set,
)
from roundel.types import PerChannel, PerTensor, QParams, ScaleKind, Scheme, Storage, needs_range


def upper_bound(node: ir.Node) -> float | None:
    """m for a Clip to [0, m]; None for any other node."""
    if node.op_type != "Clip" or node.domain not in ("", "ai.onnx"):
        return None
    bounds = clip_bounds(node)
    if bounds is None or bounds[0] != 0 or bounds[1] is None or not bounds[1] > 0:
        return None
    return bounds[1]


def saturates(params: QParams, bound: float) -> bool:
    """Whether no code stands for a value above the bound, so that a Relu is as good as the Clip."""
    top = (params.qtype.qmax - params.zero_point.astype("float64")) * params.scale.astype("float64")
    return bool(top.max() <= bound * (1 + 1e-6))


def will_saturate(plan: QuantPlan, node: ir.Node) -> bool:
    """Whether, whatever the data, the Clip's output is stored with a top at or below its bound.

    Float scales follow the observed maximum, which the Clip keeps below its bound. Power-of-two scales
    do so only when the bound itself is the top of such a range.
    """
    bound = upper_bound(node)
    tensor = plan.tensors.get(str(node.outputs[0].name)) if bound is not None else None
    if bound is None or tensor is None or not isinstance(tensor.source, Observed):
        return False
    scheme = tensor.scheme
    floating = isinstance(scheme, Scheme) and scheme.scale is ScaleKind.FLOAT
    return floating or on_grid(bound, scheme)


def on_grid(bound: float, scheme: Storage) -> bool:
    """Whether the bound is the largest value of some power-of-two scale."""
    if not isinstance(scheme, Scheme):
        return False
    _, high = code_limits(scheme)
    if not scheme.qtype.signed:
        high -= (scheme.qtype.qmax + 1) // 2  # counted from the zero point of a symmetric scheme
    exponent = math.log2(bound / high)
    return abs(exponent - round(exponent)) < 1e-6


def stored_output(node: ir.Node, stored: Container[str]) -> str | None:
    """The quantized tensor that holds the node's result: its own, or that of the activation behind it."""
    if not node.outputs:
        return None
    value = node.outputs[0]
    if value.name in stored:
        return str(value.name)
    reader = only_reader(value)
    if reader is None or not (reader.op_type in FUSING_CONSUMERS or reader.op_type in AVERAGE_POOLS):
        return None
    if reader.op_type in AVERAGE_POOLS and node.op_type != "Pad":
        return None
    after = reader.outputs[0].name
    return str(after) if after in stored else None


def becomes_hard_sigmoid(node: ir.Node, plan: QuantPlan, npu: Npu, output: str | None = None) -> bool:
    """Whether a Sigmoid is written as HardSigmoid.

    One whose output shares its scale with other tensors (class scores beside boxes, say) stays: the output
    of a HardSigmoid must have position 7 or more, and would cut the others off at 1.
    """
    if node.op_type != "Sigmoid" or not npu.sigmoid_to_hard_sigmoid:
        return False
    name = output or str(node.outputs[0].name)  # a written graph may call it otherwise
    return name not in plan.tensors or len(plan.leaders(name)) == 1


def stored_input(value: ir.Value | None, stored: Container[str]) -> str | None:
    """The quantized tensor behind a value: itself, or the input of the Pad that makes it."""
    if value is None:
        return None
    if value.name in stored:
        return str(value.name)
    maker = value.producer()
    if maker is not None and maker.op_type == "Pad" and maker.inputs[0] is not None:
        before = maker.inputs[0].name
        return str(before) if before in stored else None
    return None


def fuse_activations(graph: ir.Graph, draft: Draft, nodes: Mapping[str, NodePlan], recipe: Recipe) -> None:
    """Drop the pair between a producer and the activation that the hardware computes with it."""
    for node in graph:
        if len(node.outputs) != 1 or not nodes[str(node.name)].quantized:
            continue
        value = node.outputs[0]
        reader = only_reader(value)
        if reader is None or reader.graph is not graph or not draft.marked(value):
            continue
        if nodes[str(reader.name)].quantized and _fuses(node, reader, recipe):
            reason = f"{node.op_type} and {reader.op_type} compute as one: no pair between them"
            draft.drop(str(value.name), reason)


def _fuses(node: ir.Node, reader: ir.Node, recipe: Recipe) -> bool:
    placement = recipe.placement
    if (node.op_type, reader.op_type) in placement.no_pair_between:
        return True
    if not placement.fuse_activations or reader.op_type in placement.keep_pair_before:
        return False
    if reader.inputs[0] is not node.outputs[0]:
        return False
    if node.op_type == "Pad":
        return reader.op_type in AVERAGE_POOLS
    if node.op_type not in FUSING_PRODUCERS or reader.op_type not in FUSING_CONSUMERS:
        return False
    if reader.op_type != "Clip" or clip_bounds(reader) in FUSING_CLIP_BOUNDS:
        return True
    bound = upper_bound(reader)  # one that the quantizer enforces is written as Relu
    return recipe.npu.clip_to_relu and bound is not None and on_grid(bound, recipe.activations.scheme)


def align_groups(graph: ir.Graph, draft: Draft, nodes: Mapping[str, NodePlan], placement: Placement) -> None:
    """One scale where the hardware needs it."""
    for node in graph:
        wanted = nodes[str(node.name)].quantized and _aligned(node, placement)
        out = stored_output(node, draft.marks) if wanted else None
        if out is None:
            continue
        found = [stored_input(value, draft.marks) for value in node.inputs]
        inputs = [name for name in found if name is not None and _alignable(draft, name, out)]
        inputs = inputs if node.op_type == "Concat" else inputs[:1]
        if not inputs:
            continue
        why = f"{node.op_type} '{node.name}' works in one scale"
        if draft.ties:
            draft.tie([out, *inputs], why)
        elif node.op_type in ("Concat", "Pad"):
            draft.align(out, inputs, why)
        else:
            draft.share(out, inputs[0], why)


def _aligned(node: ir.Node, placement: Placement) -> bool:
    wanted = {
        "Concat": placement.align_concat,
        "AveragePool": placement.align_pool,
        "GlobalAveragePool": placement.align_pool,
        "MaxPool": placement.align_pool,
        "Slice": placement.align_slice,
        "Pad": placement.align_pad,
    }
    return wanted.get(node.op_type, False)


def _alignable(draft: Draft, name: str, out: str) -> bool:
    """Whether one scale can serve both tensors."""
    mark, other = draft.marks[name], draft.marks[out].scheme
    if isinstance(mark.scheme, Scheme) and isinstance(other, Scheme):
        return mark.scheme.qtype is other.qtype and mark.role is not Role.BIAS
    return mark.scheme == other and needs_range(other) and mark.role is not Role.BIAS


def keep_unsaturated(graph: ir.Graph, draft: Draft) -> None:
    """A Relu or Clip stays where an override or a shared scale took the saturation away that replaced it."""
    for node in graph:
        if str(node.name) not in draft.folded:
            continue
        value, out = node.inputs[0], str(node.outputs[0].name)
        mark = draft.marks.get(out)
        scheme = mark.scheme if mark is not None and isinstance(mark.source, Observed) else None
        observed = isinstance(scheme, Scheme) and not scheme.symmetric
        if value is not None and not (observed and draft.leaders(out) == (out,)):
            draft.folded.remove(str(node.name))
            draft.drop(str(value.name), f"only {node.op_type} '{node.name}' reads it: computed as one")


def apply_overrides(graph: ir.Graph, draft: Draft, recipe: Recipe, rules: Mapping[str, OpRule]) -> None:
    """The user's last word on single tensors."""
    values = {str(v.name): v for n in graph for v in (*n.inputs, *n.outputs) if v is not None and v.name}
    for index, override in enumerate(recipe.overrides):
        work = _Overriding(draft, recipe, rules, f"overrides[{index}]")
        matched = matching_tensors(values, override.tensors, f"{work.option}.tensors")
        work.check_named(matched, override)
        for name in matched:
            if name in draft.marks:
                work.tensor(values[name], override)
        chosen = matching_nodes(graph, override.nodes, f"{work.option}.nodes")
        for node in graph:
            if str(node.name) in chosen:
                work.node(node, override)


@dataclass(frozen=True, slots=True)
class _Overriding:
    """One override at work; `option` names it in messages."""

    draft: Draft
    recipe: Recipe
    rules: Mapping[str, OpRule]
    option: str

    def check_named(self, matched: Mapping[str, str], override: Override) -> None:
        """A tensor named in full must be able to take the override; of a pattern, at least one."""
        marks = self.draft.marks
        for name, selector in matched.items():
            mark, named = marks.get(name), name == selector
            if named and mark is not None and mark.role is Role.ACTIVATION and override.per_channel:
                raise SelectionError(
                    f"The override asks for per-channel scales of '{name}', which is not a constant.",
                    where=self.option,
                    expected="the name of a weight",
                )
            if mark is None and (named or marks.keys().isdisjoint(matched)):
                raise SelectionError(
                    f"The override names tensor '{name}', which is not quantized.",
                    where=self.option,
                    observed=self.draft.kept_float.get(name, "no quantized node reads or makes it"),
                    hint="See `roundel explain MODEL --tensor NAME` for the reason.",
                )

    def node(self, node: ir.Node, override: Override) -> None:
        """On a node, the type means its activations and the granularity means its weights."""
        for value in (*node.inputs, *node.outputs):
            mark = self.draft.marks.get(str(value.name)) if value is not None else None
            if mark is None or value is None:
                continue
            if mark.role is Role.ACTIVATION:
                self.tensor(value, override)
            elif mark.role is Role.WEIGHT and override.per_channel is not None:
                self.tensor(value, Override(nodes=override.nodes, per_channel=override.per_channel))

    def tensor(self, value: ir.Value, override: Override) -> None:
        """Activations have one scale, whatever a pattern that also matches weights says."""
        name = str(value.name)
        mark = self.draft.marks[name]
        if override.type == "float":
            self.draft.drop(name, f"{self.option}: kept in float")
            return
        flows = mark.role is Role.ACTIVATION
        per_channel = None if flows else override.per_channel
        scheme, source = mark.scheme, mark.source
        if override.type is not None:
            base = self.recipe.activations if flows else self.recipe.weights
            integer = scheme if isinstance(scheme, Scheme) else base.integer
            scheme = storage_of(override.type, integer, scaled=base.scaled)
        if isinstance(scheme, Scheme):
            if override.symmetric is not None:
                scheme = replace(scheme, symmetric=override.symmetric)
            if per_channel is not None:
                axis = self._channel_axis(value) if per_channel else None
                scheme = replace(scheme, granularity=PerTensor() if axis is None else PerChannel(axis))
        elif (override.symmetric, per_channel) != (None, None):
            raise self._not_integer(name, scheme)
        if override.fixed_range is not None:
            if not needs_range(scheme):
                raise self._not_integer(name, scheme)
            source = Fixed(override.fixed_range)
        elif override.type is not None and isinstance(source, Derived) and not isinstance(scheme, Scheme):
            source = Observed()
        if (scheme, source) != (mark.scheme, mark.source):
            reason = f"{mark.reason} ({self.option})"
            self.draft.marks[name] = replace(mark, scheme=scheme, source=source, reason=reason)
            self.draft.pinned.add(name)

    def _not_integer(self, name: str, scheme: Storage) -> SelectionError:
        return SelectionError(
            f"The override asks '{name}' for what only integers have.",
            where=self.option,
            observed=scheme,
            expected="a tensor of an integer type, or 'type' beside it",
        )

    def _channel_axis(self, value: ir.Value) -> int | None:
        for node in value.consumers():
            rule = self.rules.get(node.op_type)
            if rule is not None and rule.channel_axis is not None:
                return channel_axis(node, rule, rank(value) or 1)
        return None


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
