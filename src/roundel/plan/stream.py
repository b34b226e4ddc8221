"""The residual stream of a transformer: what layer norms read and make, and what is added up to it."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from roundel.model.graph import is_constant
from roundel.plan.delicate import VARIANCE
from roundel.plan.types import NodePlan
from roundel.targets.operators import Trait, ops_with

_NORMS = frozenset({"LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization"})
_CARRIERS = ops_with(Trait.SHAPES | Trait.SELECTS | Trait.JOINS | Trait.REPEATS)
_SUMS = frozenset({"Add", "Sub", "Sum"})


def is_transformer(graph: ir.Graph, nodes: Mapping[str, NodePlan]) -> bool:
    """Whether it multiplies matrices and has layer norms, as one operator or written out."""
    ops = {node.op_type for node in graph}
    written_out = any(verdict.reason == VARIANCE for verdict in nodes.values())
    return "MatMul" in ops and (written_out or not ops.isdisjoint(_NORMS))


def stream_tensors(graph: ir.Graph) -> frozenset[str]:
    """What layer norms make, and what they read, back to the norms and layers that it is the sum of."""
    found: set[str] = set()
    for norm in graph:
        if norm.op_type in _NORMS:
            found.add(str(norm.outputs[0].name))
    stack = [node.inputs[0] for node in graph if node.op_type in _NORMS]
    while stack:
        value = stack.pop()
        if value is None or is_constant(value) or str(value.name) in found:
            continue
        found.add(str(value.name))
        node = value.producer()
        if node is not None and node.op_type in _SUMS | _CARRIERS:
            stack += node.inputs
    return frozenset(found)
