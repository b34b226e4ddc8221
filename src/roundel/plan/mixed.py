"""A second element type for what the heavy operators read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import onnx_ir as ir

from roundel.plan.draft import Draft
from roundel.plan.types import Derived, NodePlan, Role
from roundel.recipe import Recipe, storage_of
from roundel.types import Scheme


def mix_types(graph: ir.Graph, draft: Draft, nodes: Mapping[str, NodePlan], recipe: Recipe) -> None:
    """Give inputs, weights and biases of the chosen operators their own type; outputs keep the recipe's."""
    wanted = recipe.mixed.type
    if wanted is None:
        return
    for node in graph:
        if node.op_type not in recipe.mixed.op_types or not nodes[str(node.name)].quantized:
            continue
        for value in node.inputs:
            mark = draft.marks.get(str(value.name)) if value is not None else None
            if value is None or mark is None or isinstance(mark.source, Derived):
                continue
            base = recipe.activations if mark.role is Role.ACTIVATION else recipe.weights
            integer = mark.scheme if isinstance(mark.scheme, Scheme) else base.integer
            scheme = storage_of(wanted, integer, scaled=base.scaled)
            if scheme != mark.scheme:
                why = f"{mark.reason} (mixed: {node.op_type} reads {wanted})"
                draft.marks[str(value.name)] = replace(mark, scheme=scheme, reason=why)
                draft.pinned.add(str(value.name))
