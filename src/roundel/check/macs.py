"""Multiplications of a node, from shapes."""

from __future__ import annotations

import math

import onnx_ir as ir

from roundel.model.graph import attribute_int, op_key, static_shape
from roundel.passes import refresh_shapes

LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


def close_batch(model: ir.Model) -> None:
    """Set open batch axes to 1, in place, and infer the other shapes from there."""
    for value in model.graph.inputs:
        if value.shape is not None and len(value.shape) > 0 and not isinstance(value.shape[0], int):
            value.shape = ir.Shape([1, *list(value.shape)[1:]])
    refresh_shapes(model)


def node_macs(node: ir.Node) -> int | None:
    """Multiply-accumulates of one inference; 0 for operators without, None where a shape is open."""
    op = op_key(node)
    if op not in LAYERS:
        return 0
    left, right, out = (static_shape(value) for value in (node.inputs[0], node.inputs[1], node.outputs[0]))
    if left is None or right is None or out is None:
        return None
    if op == "Conv":
        return math.prod(out) * math.prod(right[1:])
    if op == "ConvTranspose":
        return math.prod(left) * math.prod(right[1:])
    if op == "Gemm":
        return math.prod(out) * left[0 if attribute_int(node, "transA", 0) else 1]
    return math.prod(out) * left[-1]
