"""The plan, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import onnx_ir as ir

from roundel.model.graph import is_constant, is_float32, iter_values
from roundel.plan.adjust import align_groups, apply_overrides, fuse_activations, keep_unsaturated
from roundel.plan.block_axes import set_block_axes
from roundel.plan.draft import Draft
from roundel.plan.marking import Marker
from roundel.plan.mixed import mix_types, with_mixed
from roundel.plan.nodes import choose_nodes, operator_rules
from roundel.plan.stored import stored_input
from roundel.plan.types import NodePlan, QuantPlan, TensorPlan
from roundel.plan.weight_only import plan_weights
from roundel.recipe import Recipe


def build_plan(model: ir.Model, recipe: Recipe) -> QuantPlan:
    """Decide for every tensor of the prepared model what it becomes, and why.

    A pure function: the model is read, never changed. Where data is to decide which layers are mixed, nothing
    is mixed yet, and what the mixed ones would need is watched.
    """
    if recipe.mode == "weight_only":
        return plan_weights(model, recipe)
    if recipe.mixed.searched:
        whole = build_plan(model, with_mixed(recipe, None))
        return replace(build_plan(model, with_mixed(recipe, ())), watched=whole.observed_activations())
    graph = model.graph
    rules = operator_rules(graph, recipe)
    nodes = choose_nodes(model, recipe, rules)
    draft = Draft(ties=recipe.activations.scale == "power_of_two")
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
    tensors = _in_graph_order(graph, draft)
    return QuantPlan(tensors, _kept_float(graph, draft, nodes), nodes, tuple(draft.folded))


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


def _in_graph_order(graph: ir.Graph, draft: Draft) -> dict[str, TensorPlan]:
    finished = draft.finish()
    order = [str(v.name) for v in iter_values(graph)]
    return {name: finished[name] for name in order if name in finished}


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
