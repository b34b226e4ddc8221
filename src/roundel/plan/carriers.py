"""Nodes that only carry values to nodes that stay in float: a Q/DQ pair there rounds, and nothing gains."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import onnx_ir as ir

from roundel.model.graph import is_constant, is_float32
from roundel.plan.types import NodePlan
from roundel.targets.operators import Trait, ops_with

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
