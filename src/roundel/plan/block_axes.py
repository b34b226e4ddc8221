"""Along which axis the blocks of a tensor lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import onnx_ir as ir

from roundel.model.graph import attribute_int, is_constant, rank
from roundel.plan.draft import Draft
from roundel.plan.types import NodePlan
from roundel.recipe import Blocks
from roundel.types import BlockScheme


def set_block_axes(graph: ir.Graph, draft: Draft, nodes: Mapping[str, NodePlan], blocks: Blocks) -> None:
    """Give every tensor in a block format its axis.

    A tensor has one axis. Where operators disagree, as about a tensor that two products read from different
    sides, the last one in the graph decides.
    """
    for node in graph:
        for value in (*node.inputs, *node.outputs):
            if value is not None:
                _set(draft, value, _fitting(value, blocks.axis))
    if not blocks.refine_axis:
        return
    for node in graph:
        if nodes[str(node.name)].quantized:
            for value, axis in _wanted(node, draft):
                _set(draft, value, axis)


def _fitting(value: ir.Value, axis: int) -> int:
    """The axis, or the last one of a tensor that has fewer; the only one of a vector."""
    ndim = rank(value)
    if ndim is None or -ndim <= axis < ndim:
        return axis
    return max(ndim - 1, 0)


def _wanted(node: ir.Node, draft: Draft) -> Iterator[tuple[ir.Value, int]]:
    """The axes that an operator sums over, or normalizes along."""
    first = node.inputs[0] if node.inputs else None
    if node.op_type == "Softmax" and first is not None:
        yield first, attribute_int(node, "axis", -1)
    if node.op_type not in ("MatMul", "Gemm") or first is None:
        return
    second = node.inputs[1]
    assert second is not None
    if node.op_type == "Gemm":
        yield first, 0 if attribute_int(node, "transA", 0) else 1
        yield second, 1 if attribute_int(node, "transB", 0) else 0
        return
    last = _from_end(first, 1)
    yield first, last
    if _scheme(draft, first) is not None:
        yield node.outputs[0], last
    yield second, _from_end(second, 2)


def _from_end(value: ir.Value, places: int) -> int:
    """An axis counted from the last; from the first for a constant, whose rank never changes."""
    ndim = rank(value) if is_constant(value) else None
    return -places if ndim is None else max(ndim - places, 0)


def _set(draft: Draft, value: ir.Value, axis: int) -> None:
    scheme = _scheme(draft, value)
    if scheme is not None and scheme.axis != axis:
        name = str(value.name)
        draft.marks[name] = replace(draft.marks[name], scheme=replace(scheme, axis=axis))


def _scheme(draft: Draft, value: ir.Value) -> BlockScheme | None:
    mark = draft.marks.get(str(value.name))
    return mark.scheme if mark is not None and isinstance(mark.scheme, BlockScheme) else None
