"""Which nodes are quantized, and the reason for each that is not."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from roundel.errors import SelectionError, did_you_mean
from roundel.model.graph import (
    attribute_float,
    constant_array,
    has_subgraph,
    is_constant,
    op_key,
    opset_version,
)
from roundel.plan.select import matching_nodes, subgraph_nodes
from roundel.plan.spared import spared_nodes
from roundel.plan.types import NodePlan
from roundel.recipe import Recipe
from roundel.targets.operators import OPERATOR_SETS, OpRule
from roundel.types import Scheme

_HARD_SIGMOID_ALPHA = 1 / 6


def operator_rules(graph: ir.Graph, recipe: Recipe) -> dict[str, OpRule]:
    """The rules in force: the preset's table, narrowed or widened by the selection."""
    table = OPERATOR_SETS[recipe.placement.operators]
    everything = {**OPERATOR_SETS["standard"], **OPERATOR_SETS["extended"], **table}
    present = {op_key(node) for node in graph} | {node.op_type for node in graph}
    chosen = recipe.selection
    for word in (*(chosen.op_types or ()), *chosen.extra_op_types):
        if word not in everything and word not in present:
            raise SelectionError(
                f"Unknown operator type '{word}'.",
                where="selection.op_types",
                hint=did_you_mean(word, {*everything, *present}),
            )
    names = list(chosen.op_types) if chosen.op_types is not None else list(table)
    names += chosen.extra_op_types
    if chosen.all_op_types:
        names += sorted(present)
    return {name: everything.get(name, OpRule(name)) for name in names}


def choose_nodes(model: ir.Model, recipe: Recipe, rules: Mapping[str, OpRule]) -> dict[str, NodePlan]:
    """A verdict for every node of the main graph, in graph order."""
    graph, selection = model.graph, recipe.selection
    included = matching_nodes(graph, selection.include, "selection.include")
    excluded = {
        name: f"excluded by '{word}'"
        for name, word in matching_nodes(graph, selection.exclude, "selection.exclude").items()
    }
    for subgraph in selection.exclude_subgraphs:
        border = f"{', '.join(subgraph.inputs)} -> {', '.join(subgraph.outputs)}"
        for name in subgraph_nodes(graph, subgraph, "selection.exclude_subgraphs"):
            excluded.setdefault(name, f"excluded subgraph {border}")
    for name, why in spared_nodes(graph, recipe).items():
        if name not in included:
            excluded.setdefault(name, why)
    opset = opset_version(model)
    plans = {}
    for node in graph:
        name = str(node.name)
        reason = excluded.get(name)
        if reason is None and included and name not in included:
            reason = "not among the included nodes"
        reason = reason or _objection(node, rules, recipe, opset)
        plans[name] = NodePlan(name, op_key(node), reason is None, reason or "quantized")
    return plans


def _objection(node: ir.Node, rules: Mapping[str, OpRule], recipe: Recipe, opset: int) -> str | None:
    rule = rules.get(op_key(node)) or rules.get(node.op_type)
    if has_subgraph(node):
        return "control flow: its bodies stay float"
    if rule is None:
        return f"{op_key(node)} is not in the operator table"
    if opset < rule.min_opset:
        return f"{node.op_type} needs opset {rule.min_opset}, the model has {opset}"
    if any(_infinite(value) for value in node.inputs):
        return "a constant input is infinite or NaN"
    if node.op_type == "MatMul" and recipe.placement.matmul_const_only and not is_constant(node.inputs[1]):
        return "MatMul of two computed tensors"
    steps = isinstance(recipe.activations.scheme, Scheme)
    if node.op_type == "HardSigmoid" and steps and not _npu_hard_sigmoid(node):
        return "HardSigmoid other than alpha 1/6, beta 1/2"
    return None


def _infinite(value: ir.Value | None) -> bool:
    if not is_constant(value) or value is None or value.dtype is not ir.DataType.FLOAT:
        return False
    array = constant_array(value)
    return array is not None and not np.isfinite(array).all()


def _npu_hard_sigmoid(node: ir.Node) -> bool:
    alpha = attribute_float(node, "alpha", 0.2)
    return abs(alpha - _HARD_SIGMOID_ALPHA) < 1e-6 and abs(attribute_float(node, "beta", 0.5) - 0.5) < 1e-6
