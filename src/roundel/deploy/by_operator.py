"""Where each operator type of a model went."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from roundel.deploy.placement import CPU_DEVICES, PlacementReport
from roundel.model import load_model
from roundel.model.graph import op_key
from roundel.qdq.pairs import QUARK


def model_operators(path: Path) -> dict[str, int]:
    """How many nodes of each operator a model has, most frequent first."""
    graph = load_model(path, allow_quantized=True, opaque=QUARK).model.graph
    return dict(Counter(op_key(node) for node in graph).most_common())


def places(report: PlacementReport, op: str) -> str:
    """'NPU', 'CPU', 'both' or '-' (not named) for an operator type."""
    on_cpu = {name in CPU_DEVICES for name, types in report.op_types.items() if op in types}
    if len(on_cpu) == 2:
        return "both"
    return "-" if not on_cpu else "CPU" if True in on_cpu else "NPU"
