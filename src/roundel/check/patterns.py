"""Shapes in the graph that the placement and the rules both look for."""

from __future__ import annotations

import onnx_ir as ir

from roundel.model.graph import attribute_int, only_reader, op_key, rank

_SHUFFLE_RANK = 5
_ACTIVATIONS = ("Relu", "Clip")


def maker_of(node: ir.Node, index: int = 0) -> ir.Node | None:
    """The node that makes one of the inputs."""
    value = node.inputs[index] if index < len(node.inputs) else None
    return None if value is None else value.producer()


def is_depthwise(conv: ir.Node) -> bool:
    """Whether every channel has a kernel of its own."""
    group = attribute_int(conv, "group", 1)
    weight = conv.inputs[1] if len(conv.inputs) > 1 else None
    if group == 1 or weight is None or weight.shape is None:
        return False
    return len(weight.shape) > 1 and weight.shape[1] == 1


def conv_before(node: ir.Node) -> ir.Node | None:
    """The Conv whose result only this activation reads."""
    maker = maker_of(node) if op_key(node) in _ACTIVATIONS else None
    if maker is None or op_key(maker) != "Conv" or only_reader(maker.outputs[0]) is not node:
        return None
    return maker


def activation_behind(conv: ir.Node) -> ir.Node | None:
    """The Relu or Clip that alone reads the Conv."""
    reader = only_reader(conv.outputs[0])
    return reader if reader is not None and op_key(reader) in _ACTIVATIONS else None


def channel_shuffle(transpose: ir.Node) -> tuple[ir.Node, ir.Node, ir.Node] | None:
    """Reshape to 5-D, Transpose, Reshape back, named by its Transpose."""
    if op_key(transpose) != "Transpose":
        return None
    first, last = maker_of(transpose), only_reader(transpose.outputs[0])
    if first is None or last is None or {op_key(first), op_key(last)} != {"Reshape"}:
        return None
    if rank(transpose.outputs[0]) != _SHUFFLE_RANK or rank(last.outputs[0]) == _SHUFFLE_RANK:
        return None
    return first, transpose, last


def norm_after_concat(node: ir.Node) -> ir.Node | None:
    """The Concat that a BatchNormalization reads."""
    maker = maker_of(node) if op_key(node) == "BatchNormalization" else None
    return maker if maker is not None and op_key(maker) == "Concat" else None
