"""Codes that are stored once where several layers have the same."""

from __future__ import annotations

import hashlib
from collections import defaultdict

import onnx_ir as ir

from roundel.model.graph import is_constant


def share_codes(graph: ir.Graph) -> int:
    """Let DequantizeLinear nodes read one constant where codes, scales and zero points are all equal; exact.

    Layers that shared a weight got copies of it, so that each could have scales of its own. Where they ended
    with the same, the copies say nothing. Returns the number of constants that went.
    """
    groups: dict[tuple[object, ...], list[ir.Node]] = defaultdict(list)
    for node in graph:
        if node.op_type == "DequantizeLinear" and is_constant(node.inputs[0]):
            groups[_outside(node)].append(node)
    replaced: set[ir.Value] = set()
    # The codes, which may be large, are looked at only where all else is equal.
    for alike in (nodes for nodes in groups.values() if len(nodes) > 1):
        first: dict[object, ir.Node] = {}
        for node in alike:
            replaced |= _share(node, first.setdefault(_content(node.inputs[0]), node))
    unread = [v for v in replaced if not v.uses() and not v.is_graph_output() and v.is_initializer()]
    for value in unread:
        del graph.initializers[str(value.name)]
    return len(unread)


def _share(node: ir.Node, first: ir.Node) -> set[ir.Value]:
    """Read the first node's constants; the own ones that this replaces."""
    own = [(index, value) for index, value in enumerate(node.inputs) if value is not first.inputs[index]]
    for index, _ in own:
        node.replace_input_with(index, first.inputs[index])
    return {value for _, value in own if value is not None}


def _outside(node: ir.Node) -> tuple[object, ...]:
    """All but the codes: operator, attributes, type and shape, scales and zero points."""
    attributes = tuple(sorted((name, str(attr.value)) for name, attr in node.attributes.items()))
    codes = node.inputs[0].const_value if node.inputs[0] is not None else None
    shape = None if codes is None else (codes.dtype, tuple(codes.shape.numpy()))
    return (node.domain, attributes, shape, *map(_content, node.inputs[1:]))


def _content(value: ir.Value | None) -> object:
    if value is None or value.const_value is None:
        return value
    tensor = value.const_value
    return tensor.dtype, tuple(tensor.shape.numpy()), hashlib.sha256(tensor.tobytes()).digest()
