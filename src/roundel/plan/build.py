"""The plan, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.model.graph import (
    attribute_float,
    attribute_int,
    constant_array,
    is_constant,
    is_float32,
    iter_values,
    rank,
)
from roundel.plan.adjust import (
    align_groups,
    apply_overrides,
    branches,
    fuse_activations,
    keep_unsaturated,
    stored_input,
)
from roundel.plan.marking import Draft, Marker
from roundel.plan.select import choose_nodes, matching_nodes, operator_rules
from roundel.plan.types import Derived, NodePlan, Observed, QuantPlan, Role, TensorPlan
from roundel.recipe.settings import Blocks, Mixed, Recipe, storage_of
from roundel.targets.operators import operator_set
from roundel.types import BlockScheme, Scheme


@dataclass(frozen=True, slots=True)
class WeightLayer:
    """A MatMul or Gemm whose weight is stored in few bits.

    Attributes:
        node: its name.
        op: its operator.
        data, weight, output: the tensors around it.
        transposed: the weight lies as (outputs, inputs), as Gemm's transB has it.
    """

    node: str
    op: str
    data: str
    weight: str
    output: str
    transposed: bool

    @property
    def key(self) -> tuple[str, bool]:
        """Equal for layers that read one matrix in one way."""
        return self.weight, self.transposed

    def matrix(self, weight: NDArray[Any]) -> NDArray[Any]:
        """The weight as (outputs, inputs)."""
        return weight if self.transposed else weight.T

    def tensor(self, matrix: NDArray[Any]) -> NDArray[Any]:
        """A matrix (outputs, inputs) as the weight lies."""
        return matrix if self.transposed else np.ascontiguousarray(matrix.T)


def plan_weights(model: ir.Model, recipe: Recipe) -> QuantPlan:
    """Decide for every matrix whether it is stored in few bits, and why. Reads the model only."""
    graph = model.graph
    matrices = operator_set("matmul")
    rules = {op: rule for op, rule in operator_rules(graph, recipe).items() if op in matrices}
    nodes = choose_nodes(model, recipe, rules)
    for node in graph:
        verdict = nodes[str(node.name)]
        reason = _objection(node) if verdict.quantized else None
        if reason is not None:
            nodes[verdict.name] = replace(verdict, quantized=False, reason=reason)
    tensors, scheme = {}, recipe.weight_only.scheme
    for layer in weight_layers(graph, nodes):
        why, name = f"constant operand of {layer.op}", layer.weight
        tensors[name] = TensorPlan(name, Role.WEIGHT, scheme, Observed(), layer.node, why)
    kept = {
        str(v.name): "mode weight_only: activations stay float"
        for v in iter_values(graph)
        if is_float32(v) and not is_constant(v)
    }
    return QuantPlan(tensors, kept, nodes)


def weight_layers(graph: ir.Graph, nodes: Mapping[str, NodePlan]) -> tuple[WeightLayer, ...]:
    """The chosen layers, in graph order."""
    found = []
    for node in graph:
        verdict = nodes.get(str(node.name))
        if verdict is None or not verdict.quantized:
            continue
        data, weight = node.inputs[0], node.inputs[1]
        assert data is not None
        assert weight is not None
        tensors = (str(data.name), str(weight.name), str(node.outputs[0].name))
        turned = node.op_type == "Gemm" and bool(attribute_int(node, "transB", 0))
        found.append(WeightLayer(str(node.name), node.op_type, *tensors, transposed=turned))
    return tuple(found)


def _objection(node: ir.Node) -> str | None:
    weight = constant_array(node.inputs[1])
    if weight is None:
        return f"{node.op_type} of two computed tensors"
    if is_constant(node.inputs[0]):
        return "both operands are constants"
    if weight.dtype != np.float32 or weight.ndim != 2 or weight.size == 0:
        return f"its weight is {weight.dtype} {list(weight.shape)}, not a float32 matrix"
    if node.op_type != "Gemm":
        return None
    if attribute_int(node, "transA", 0):
        return "Gemm that transposes its input"
    if attribute_float(node, "alpha", 1.0) != 1.0:
        return "Gemm that scales its product (alpha)"
    return "Gemm that scales its bias (beta)" if attribute_float(node, "beta", 1.0) != 1.0 else None


def mix_types(graph: ir.Graph, draft: Draft, nodes: Mapping[str, NodePlan], recipe: Recipe) -> None:
    """Give inputs, weights and biases of the chosen operators their own type; outputs keep the recipe's."""
    moving = recipe.mixed.type
    if moving is None:
        return
    chosen = frozenset(candidates(graph, nodes, recipe.mixed))
    for node in graph:
        if str(node.name) not in chosen:
            continue
        for value in node.inputs:
            mark = draft.marks.get(str(value.name)) if value is not None else None
            if value is None or mark is None or isinstance(mark.source, Derived):
                continue
            flows = mark.role is Role.ACTIVATION
            base = recipe.activations if flows else recipe.weights
            wanted = moving if flows else recipe.mixed.weights or moving
            integer = mark.scheme if isinstance(mark.scheme, Scheme) else base.integer
            scheme = storage_of(wanted, integer, scaled=base.scaled)
            if scheme != mark.scheme:
                why = f"{mark.reason} (mixed: {node.op_type} reads {wanted})"
                draft.marks[str(value.name)] = replace(mark, scheme=scheme, reason=why)
                draft.pinned.add(str(value.name))


def candidates(graph: ir.Graph, nodes: Mapping[str, NodePlan], mixed: Mixed) -> tuple[str, ...]:
    """The quantized nodes that the recipe would mix, in graph order.

    Raises:
        SelectionError: a selector matches nothing.
    """
    only = matching_nodes(graph, mixed.include, "mixed.include")
    never = matching_nodes(graph, mixed.exclude, "mixed.exclude")
    names = [str(node.name) for node in graph if node.op_type in mixed.op_types]
    wanted = [name for name in names if (name in only or not mixed.include) and name not in never]
    return tuple(name for name in wanted if nodes[name].quantized)


def with_mixed(recipe: Recipe, chosen: Sequence[str] | None) -> Recipe:
    """The recipe with these nodes mixed, and no search: all candidates for None, none at all when empty."""
    if chosen is not None and not chosen:
        return recipe.model_copy(update={"mixed": Mixed()})
    mixed = recipe.mixed.model_copy(update={"threshold": None, "goal": "speed", "metric": "l2", "output": 0})
    if chosen is not None:
        mixed = mixed.model_copy(update={"include": tuple(chosen), "exclude": ()})
    return recipe.model_copy(update={"mixed": mixed})


def set_block_axes(graph: ir.Graph, draft: Draft, nodes: Mapping[str, NodePlan], blocks: Blocks) -> None:
    """Give every tensor in a block format its axis.

    A tensor has one axis. Where operators disagree, as about a tensor that two products read from different
    sides, the last one in the graph decides.
    """
    for node in graph:
        for value in (*node.inputs, *node.outputs):
            if value is not None:
                _set(draft, value, _fitting(value, blocks.axis))
    if not blocks.refine_axis:
        return
    for node in graph:
        if nodes[str(node.name)].quantized:
            for value, axis in _wanted(node, draft):
                _set(draft, value, axis)


def _fitting(value: ir.Value, axis: int) -> int:
    """The axis, or the last one of a tensor that has fewer; the only one of a vector."""
    ndim = rank(value)
    if ndim is None or -ndim <= axis < ndim:
        return axis
    return max(ndim - 1, 0)


def _wanted(node: ir.Node, draft: Draft) -> Iterator[tuple[ir.Value, int]]:
    """The axes that an operator sums over, or normalizes along."""
    first = node.inputs[0] if node.inputs else None
    if node.op_type == "Softmax" and first is not None:
        yield first, attribute_int(node, "axis", -1)
    if node.op_type not in ("MatMul", "Gemm") or first is None:
        return
    second = node.inputs[1]
    assert second is not None
    if node.op_type == "Gemm":
        yield first, 0 if attribute_int(node, "transA", 0) else 1
        yield second, 1 if attribute_int(node, "transB", 0) else 0
        return
    last = _from_end(first, 1)
    yield first, last
    if _scheme(draft, first) is not None:
        yield node.outputs[0], last
    yield second, _from_end(second, 2)


def _from_end(value: ir.Value, places: int) -> int:
    """An axis counted from the last; from the first for a constant, whose rank never changes."""
    ndim = rank(value) if is_constant(value) else None
    return -places if ndim is None else max(ndim - places, 0)


def _set(draft: Draft, value: ir.Value, axis: int) -> None:
    scheme = _scheme(draft, value)
    if scheme is not None and scheme.axis != axis:
        name = str(value.name)
        draft.marks[name] = replace(draft.marks[name], scheme=replace(scheme, axis=axis))


def _scheme(draft: Draft, value: ir.Value) -> BlockScheme | None:
    mark = draft.marks.get(str(value.name))
    return mark.scheme if mark is not None and isinstance(mark.scheme, BlockScheme) else None


def build_plan(model: ir.Model, recipe: Recipe) -> QuantPlan:
    """Decide for every tensor of the prepared model what it becomes, and why.

    A pure function: the model is read, never changed. Where data is to decide which layers are mixed, nothing
    is mixed yet, and what the mixed ones would need is watched.
    """
    if recipe.mode == "weight_only":
        return plan_weights(model, recipe)
    if recipe.mixed.searched:
        whole = build_plan(model, with_mixed(recipe, None))
        plain = build_plan(model, with_mixed(recipe, ()))
        return replace(plain, watched=(*plain.watched, *whole.observed_activations()))
    graph = model.graph
    rules = operator_rules(graph, recipe)
    nodes = choose_nodes(model, recipe, rules)
    draft = Draft(recipe)
    marker = Marker(draft, recipe)
    for node in graph:
        if nodes[str(node.name)].quantized:
            marker.mark(node, rules.get(node.op_type) or rules[nodes[str(node.name)].op])
    fuse_activations(graph, draft, nodes, recipe)
    align_groups(graph, draft, nodes, recipe.placement)
    mix_types(graph, draft, nodes, recipe)
    apply_overrides(graph, draft, recipe, rules)
    keep_unsaturated(graph, draft)
    set_block_axes(graph, draft, nodes, recipe.blocks)
    nodes = _touched(graph, draft, nodes)
    names = [str(value.name) for value in iter_values(graph)]
    tensors = {name: draft.finished(name) for name in names if name in draft.marks}
    plan = QuantPlan(tensors, _kept_float(graph, draft, nodes), nodes, tuple(draft.folded))
    return replace(plan, watched=tuple(name for branch in branches(graph, plan) for name in branch.leaders))


def _touched(graph: ir.Graph, draft: Draft, nodes: Mapping[str, NodePlan]) -> dict[str, NodePlan]:
    """The verdicts, where a node without a single quantized tensor (it adds integers, say) is none."""
    verdicts = dict(nodes)
    for node in graph:
        around, plan = (*node.inputs, *node.outputs), nodes[str(node.name)]
        reached = any(map(draft.marked, around)) or any(stored_input(v, draft.marks) for v in node.inputs)
        if plan.quantized and plan.name not in draft.folded and not reached:
            alone = any(is_float32(v) for v in around)
            reason = "nothing around it is quantized" if alone else "no float32 tensor around it"
            verdicts[plan.name] = replace(plan, quantized=False, reason=reason)
    return verdicts


def _kept_float(graph: ir.Graph, draft: Draft, nodes: Mapping[str, NodePlan]) -> dict[str, str]:
    reasons = {}
    for value in iter_values(graph):
        name = str(value.name)
        if name in draft.marks or is_constant(value) or not is_float32(value):
            continue
        reasons[name] = draft.kept_float.get(name) or _why_float(value, nodes)
    return reasons


def _why_float(value: ir.Value, nodes: Mapping[str, NodePlan]) -> str:
    around = [value.producer(), *value.consumers()]
    verdicts = [nodes[str(n.name)] for n in around if n is not None and str(n.name) in nodes]
    reasons = {f"{v.op}: {v.reason}" for v in verdicts if not v.quantized}
    return "; ".join(sorted(reasons)) or "nothing around it is quantized"
