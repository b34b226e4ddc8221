"""Inputs that look rows up in a table, and how many rows there are."""

from __future__ import annotations

import onnx_ir as ir

from roundel.model.graph import attribute_int

_PASSING = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})


def table_rows(graph: ir.Graph) -> dict[str, int]:
    """For each input whose values a Gather takes as indices: the rows of the smallest such table."""
    found: dict[str, int] = {}
    for value in graph.inputs:
        sizes = _sizes(value)
        if sizes:
            found[str(value.name)] = min(sizes)
    return found


def _sizes(start: ir.Value) -> list[int]:
    sizes: list[int] = []
    waiting, seen = [start], {start}
    while waiting:
        value = waiting.pop()
        for node, place in value.uses():
            if node.op_type == "Gather" and place == 1:
                sizes += _rows(node)
            elif node.op_type in _PASSING and place == 0:
                fresh = [out for out in node.outputs if out not in seen]
                waiting += fresh
                seen.update(fresh)
    return sizes


def _rows(node: ir.Node) -> list[int]:
    table, axis = node.inputs[0], attribute_int(node, "axis", 0)
    shape = None if table is None else table.shape
    if shape is None or not -len(shape) <= axis < len(shape):
        return []
    size = shape[axis]
    return [size] if isinstance(size, int) and size > 0 else []
