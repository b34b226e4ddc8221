"""What a model takes, from its shapes alone: weights, activations, multiplications."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from roundel.model.graph import attribute_int, is_constant, weight_bytes


@dataclass(frozen=True, slots=True)
class Footprint:
    """A model in numbers; sizes in bytes.

    Attributes:
        nodes: how many.
        weights: all initializers.
        largest_weight: the largest of them.
        mapped: those that lie in files of their own.
        inputs: one sample.
        activations: every computed tensor of one sample.
        largest_activation: the largest of them.
        peak: the most of them that a run needs at once.
        macs: multiply-accumulates of one sample.
        solving: what choosing the rounding of the largest layer takes.
    """

    nodes: int
    weights: int
    largest_weight: int
    mapped: int
    inputs: int
    activations: int
    largest_activation: int
    peak: int
    macs: int
    solving: int


def footprint(model: ir.Model) -> Footprint:
    """One walk over the graph; an open dimension counts as 1, an unknown shape as that of the first input."""
    graph = model.graph
    sizes: dict[str, int] = {}
    for value in graph.inputs:
        sizes[str(value.name)] = _bytes(value, 0)
    fed = sum(sizes.values())
    last = {v: node for node in graph for v in node.inputs if v is not None and not is_constant(v)}
    live = peak = sum(sizes.values())
    macs, solving = 0, 0
    made: dict[str, int] = {}
    for node in graph:
        given = next((sizes.get(str(v.name), 0) for v in node.inputs if v is not None), 0)
        for value in node.outputs:
            sizes[str(value.name)] = made[str(value.name)] = _bytes(value, given)
            live += sizes[str(value.name)]
        peak = max(peak, live)
        ending = {v for v in node.inputs if v is not None and last.get(v) is node}
        live -= sum(sizes.get(str(v.name), 0) for v in ending)
        work, rows = _work(node, made)
        macs, solving = macs + work, max(solving, rows)
    constants = [v.const_value for v in graph.initializers.values() if v.const_value is not None]
    return Footprint(
        nodes=len(graph),
        weights=weight_bytes(model),
        largest_weight=max((tensor.nbytes for tensor in constants), default=0),
        mapped=sum(tensor.nbytes for tensor in constants if isinstance(tensor, ir.ExternalTensor)),
        inputs=fed,
        activations=sum(made.values()),
        largest_activation=max(made.values(), default=0),
        peak=peak,
        macs=macs,
        solving=solving,
    )


_ROWS = 1024  # that are summed up at once when a layer is solved


def _work(node: ir.Node, made: Mapping[str, int]) -> tuple[int, int]:
    """Multiplications of a layer, and bytes of what its rounding is chosen from."""
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    if node.op_type not in ("Conv", "ConvTranspose", "Gemm", "MatMul") or weight is None:
        return 0, 0
    dims = [d for d in weight.shape or () if isinstance(d, int)]
    if len(dims) < 2:
        return 0, 0
    outputs = made.get(str(node.outputs[0].name), 0) // 4
    groups = attribute_int(node, "group", 1) if node.op_type.startswith("Conv") else 1
    inner = dims[0] if node.op_type in ("MatMul", "Gemm") else math.prod(dims[1:])
    if node.op_type == "Gemm" and attribute_int(node, "transB", 0):
        inner = dims[1]
    return outputs * inner, 8 * groups * inner * (2 * _ROWS + 4 * inner)


def _bytes(value: ir.Value, unknown: int) -> int:
    if value.shape is None:
        return unknown
    try:
        item = 4 if value.dtype is None else math.ceil(value.dtype.itemsize)
    except TypeError:  # text has no size of its own
        item = 16
    return item * math.prod(d if isinstance(d, int) and d > 0 else 1 for d in value.shape)
