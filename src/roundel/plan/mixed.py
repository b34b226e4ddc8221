"""A second element type for what the heavy operators read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir

from roundel.plan.draft import Draft
from roundel.plan.select import matching_nodes
from roundel.plan.types import Derived, NodePlan, Role
from roundel.recipe import Mixed, Recipe, storage_of
from roundel.types import Scheme


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
            base, wanted = (
                (recipe.activations, moving) if flows else (recipe.weights, recipe.mixed.weights or moving)
            )
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
