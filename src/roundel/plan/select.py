"""Which nodes and tensors a user's words mean; words that mean nothing are an error with suggestions."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np
import onnx_ir as ir
from pydantic_core import SchemaError, SchemaValidator, core_schema

from roundel.errors import SelectionError, did_you_mean
from roundel.model.graph import (
    attribute_float,
    constant_array,
    downstream,
    has_subgraph,
    is_constant,
    op_key,
    opset_version,
    upstream,
)
from roundel.plan.float_parts import delicate_nodes, float_part_nodes, spare_carriers
from roundel.plan.types import NodePlan
from roundel.recipe.settings import Placement, Recipe, Subgraph
from roundel.targets.operators import OpRule, Style, operator_set
from roundel.types import Scheme


def matching_nodes(graph: ir.Graph, selectors: Sequence[str], option: str) -> dict[str, str]:
    """Node name -> the selector that matched it. A tensor's name stands for the node that makes it."""
    return _matched(selectors, partial(_nodes, graph), partial(_nothing, graph, option=option))


def matching_tensors(names: Iterable[str], selectors: Sequence[str], option: str) -> dict[str, str]:
    """Tensor name -> the selector that matched it."""
    pool = list(names)

    def nothing(selector: str) -> SelectionError:
        hint = did_you_mean(selector, pool) or "List the tensors with `roundel explain MODEL`."
        return SelectionError(f"No tensor matches '{selector}'.", where=option, hint=hint)

    return _matched(selectors, partial(_match, pool), nothing)


def _matched(
    selectors: Sequence[str], find: Callable[[str], list[str]], nothing: Callable[[str], SelectionError]
) -> dict[str, str]:
    found: dict[str, str] = {}
    for selector in selectors:
        hits = find(selector)
        if not hits:
            raise nothing(selector)
        for name in hits:
            found.setdefault(name, selector)
    return found


def subgraph_nodes(graph: ir.Graph, subgraph: Subgraph, option: str) -> list[str]:
    """The nodes on any path from the inputs to the outputs (nodes or tensors), both ends included."""
    starts = [node for word in subgraph.inputs for node in _anchors(graph, word, option, reading=True)]
    ends = [node for word in subgraph.outputs for node in _anchors(graph, word, option, reading=False)]
    between = downstream(graph, starts) & upstream(graph, ends)
    if not between:
        raise SelectionError(
            "No path leads from the subgraph's inputs to its outputs.",
            where=option,
            observed=f"{', '.join(subgraph.inputs)} -> {', '.join(subgraph.outputs)}",
            hint="Name tensors or nodes in the order in which data flows.",
        )
    return [str(node.name) for node in graph if node in between]


def _match(pool: Sequence[str], selector: str) -> list[str]:
    if selector.startswith("re:"):
        finds = _expression(selector)
        return [name for name in pool if finds(name)]
    exact = [name for name in pool if name == selector]
    if exact or not any(c in selector for c in "*?["):
        return exact
    return [name for name in pool if fnmatch.fnmatchcase(name, selector)]


def _expression(selector: str) -> Callable[[str], bool]:
    """Whether a text holds what the regular expression behind `re:` describes.

    Pydantic's engine takes time in proportion to the text. Python's own may go back and forth over a name of
    thirty letters for years, and nothing stops it.
    """
    schema = core_schema.str_schema(pattern=selector[3:], regex_engine="rust-regex")
    try:
        return SchemaValidator(schema).isinstance_python
    except SchemaError as error:
        raise SelectionError(
            "The regular expression is not valid.",
            where=selector,
            observed=" ".join(str(error).split())[:300],
            expected="a regular expression without look-around (?=, ?!, ?<) and back references (\\1)",
            hint="Give several selectors instead, or a glob such as 'block*/conv'.",
        ) from error


def _nodes(graph: ir.Graph, selector: str) -> list[str]:
    if selector.startswith("op:"):
        return [str(n.name) for n in graph if selector[3:] in (n.op_type, op_key(n))]
    hits = _match([str(n.name) for n in graph], selector)
    if hits:
        return hits
    makers = {str(v.name): str(n.name) for n in graph for v in n.outputs if v.name}
    return list(dict.fromkeys(makers[name] for name in _match(list(makers), selector)))


def _nothing(graph: ir.Graph, selector: str, option: str) -> SelectionError:
    if selector.startswith("op:"):
        kinds = sorted({n.op_type for n in graph})
        hint = did_you_mean(selector[3:], kinds)
        text = f"The model has no '{selector[3:]}' operator."
        return SelectionError(text, where=option, expected=", ".join(kinds), hint=hint)
    names = [str(n.name) for n in graph] + [str(v.name) for n in graph for v in n.outputs]
    hint = did_you_mean(selector, names) or "List the nodes with `roundel inspect MODEL --nodes`."
    return SelectionError(f"No node or tensor matches '{selector}'.", where=option, hint=hint)


def _anchors(graph: ir.Graph, word: str, option: str, *, reading: bool) -> list[ir.Node]:
    """Nodes that a subgraph border means: the node itself, or the readers / the maker of a tensor."""
    by_name = {str(n.name): n for n in graph}
    if word in by_name:
        return [by_name[word]]
    for value in [*graph.inputs, *(v for n in graph for v in n.outputs)]:
        if value.name == word:
            if reading:
                return [n for n in value.consumers() if n.graph is graph]
            maker = value.producer()
            return [maker] if maker is not None else []
    raise _nothing(graph, word, option)


_HARD_SIGMOID_ALPHA = 1 / 6


def operator_rules(graph: ir.Graph, recipe: Recipe) -> dict[str, OpRule]:
    """The rules in force: the preset's table, narrowed or widened by the selection."""
    table = operator_set(recipe.placement.operators)
    everything = {**operator_set("extended"), **table}
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
    named = matching_nodes(graph, selection.exclude, "selection.exclude")
    excluded = {name: f"excluded by '{word}'" for name, word in named.items()}
    for subgraph in selection.exclude_subgraphs:
        border = f"{', '.join(subgraph.inputs)} -> {', '.join(subgraph.outputs)}"
        for name in subgraph_nodes(graph, subgraph, "selection.exclude_subgraphs"):
            excluded.setdefault(name, f"excluded subgraph {border}")
    for name, why in float_part_nodes(graph, recipe).items():
        if name not in included:
            excluded.setdefault(name, why)
    delicate = delicate_nodes(graph, recipe)
    opset = opset_version(model)
    plans = {}
    for node in graph:
        name = str(node.name)
        reason = excluded.get(name)
        if reason is None and included and name not in included:
            reason = "not among the included nodes"
        reason = reason or _objection(node, rules, recipe, opset)
        reason = reason or (None if name in included else delicate.get(name))
        plans[name] = NodePlan(name, op_key(node), reason is None, reason or "quantized")
    if not (recipe.keeps_float_parts and recipe.improve.carriers):
        return plans
    return spare_carriers(graph, plans, included, _exact_carriers(rules, recipe.placement))


def _exact_carriers(rules: Mapping[str, OpRule], placement: Placement) -> set[str]:
    """The operators that keep their input's scale, or give their inputs their own: codes pass as they are."""
    aligned = {"Concat": placement.align_concat, "Slice": placement.align_slice, "Pad": placement.align_pad}
    return {op for op, rule in rules.items() if rule.style is Style.SHARE or aligned.get(op, False)}


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
