"""Parts that stay in float where accuracy is asked for: no integer format with one scale can hold them."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from roundel.plan.detection_head import find_detection_head
from roundel.plan.front_end import find_front_end
from roundel.plan.types import NodePlan
from roundel.recipe import Recipe

FRONT_END = "computes a spectrogram: the Log behind it magnifies errors of small values"
HEAD = "decodes detections: one scale for boxes and scores leaves the scores zero"

_TOLD = {
    FRONT_END: "{} nodes that compute a spectrogram stay in float: the Log behind them magnifies errors of "
    "small values (-s improve.front_end=false quantizes them)",
    HEAD: "{} nodes of the detection head stay in float: one scale for boxes and scores leaves the scores "
    "zero (-s improve.detection_head=false quantizes them)",
}


def spared_nodes(graph: ir.Graph, recipe: Recipe) -> dict[str, str]:
    """For each node that stays in float for its place in the model, the reason."""
    if not recipe.spares:
        return {}
    found: dict[str, str] = {}
    if recipe.improve.front_end:
        found |= {str(node.name): FRONT_END for node in find_front_end(graph)}
    if recipe.improve.detection_head:
        found |= {str(node.name): HEAD for node in find_detection_head(graph)}
    return found


def spared_notes(nodes: Mapping[str, NodePlan]) -> tuple[str, ...]:
    """What the user is told of them."""
    counts = {reason: sum(node.reason == reason for node in nodes.values()) for reason in _TOLD}
    return tuple(_TOLD[reason].format(count) for reason, count in counts.items() if count)
