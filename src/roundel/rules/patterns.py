"""Multiplications of a node, from shapes."""

from __future__ import annotations

import math
from collections.abc import Container

import onnx_ir as ir

from roundel.model.graph import (
    FLOAT_TYPES,
    attribute_int,
    constant_scalar,
    is_constant,
    only_reader,
    op_key,
    rank,
    static_shape,
)
from roundel.passes import refresh_shapes
from roundel.targets import operators


def close_batch(model: ir.Model) -> None:
    """Set open batch axes to 1, in place, and infer the other shapes from there."""
    for value in model.graph.inputs:
        if value.shape is not None and len(value.shape) > 0 and not isinstance(value.shape[0], int):
            value.shape = ir.Shape([1, *list(value.shape)[1:]])
    refresh_shapes(model)


def node_macs(node: ir.Node) -> int | None:
    """Multiply-accumulates of one inference; 0 for operators without, None where a shape is open."""
    op = op_key(node)
    if op not in operators.LAYERS:
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


# Behind these, quantizers for the NPU put a Mul by nearly 1 that imitates the hardware's arithmetic.
_GAINED = operators.ops_with(operators.Trait.GAIN)
_GAINS = (0.9, 1.1)


def open_sides(node: ir.Node, stored: Container[str]) -> list[str]:
    """Float tensors around the node that are stored as float and that no fusion hides."""
    found = [str(value.name) for value in _data_inputs(node) if not _input_closed(node, value, stored)]
    for value in node.outputs:
        if _is_float(value) and value.name not in stored and not _fused_onward(value, node):
            found.append(str(value.name))
    return found


def is_gain(node: ir.Node) -> bool:
    """Whether the node is such a Mul by nearly 1."""
    source = node.inputs[0] if node.op_type == "Mul" and len(node.inputs) == 2 else None
    maker = None if source is None else source.producer()
    if maker is None or maker.op_type not in _GAINED:
        return False
    factor = constant_scalar(node.inputs[1])
    return factor is not None and _GAINS[0] < factor < _GAINS[1]


def fused_maker(node: ir.Node, stored: Container[str]) -> ir.Node | None:
    """The node before, where no pair stands between the two because they compute as one."""
    value = node.inputs[0] if node.inputs else None
    maker = None if value is None or value.name in stored else value.producer()
    return maker if maker is not None and value is not None and _fused_onward(value, maker) else None


def _data_inputs(node: ir.Node) -> list[ir.Value]:
    rule = operators.OPERATORS.get(node.op_type)
    if rule is None or not rule.sets:
        indices: tuple[int, ...] = (0,)
    elif rule.data == operators.EVERY_INPUT:
        indices = tuple(range(len(node.inputs)))
    else:
        indices = (*rule.data, *rule.weights)
    values = [node.inputs[index] for index in indices if index < len(node.inputs)]
    return [value for value in values if value is not None and _is_float(value)]


def _input_closed(node: ir.Node, value: ir.Value, stored: Container[str]) -> bool:
    if value.name in stored:
        return True
    if is_constant(value):
        return is_gain(node)
    maker = value.producer()
    return maker is not None and _fused_onward(value, maker)


def _fused_onward(value: ir.Value, maker: ir.Node) -> bool:
    """Whether the maker and the one reader of a value compute as one."""
    reader = only_reader(value)
    if reader is None:
        return False
    if maker.op_type == "Pad":
        return reader.op_type in operators.AVERAGE_POOLS
    if is_gain(reader):
        return True
    return maker.op_type in operators.FUSING_PRODUCERS and reader.op_type in operators.FUSING_CONSUMERS


def _is_float(value: ir.Value) -> bool:
    return value.dtype in FLOAT_TYPES
