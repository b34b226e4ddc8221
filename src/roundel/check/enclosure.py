"""Which sides of a node no Q/DQ pair closes."""

from __future__ import annotations

from collections.abc import Container

import onnx_ir as ir

from roundel.model.graph import FLOAT_TYPES, constant_scalar, is_constant, only_reader
from roundel.targets.operators import EVERY_INPUT, EXTENDED, FUSING_CONSUMERS, FUSING_PRODUCERS, POOLS

# Behind these, quantizers for the NPU put a Mul by nearly 1 that imitates the hardware's arithmetic.
_GAINED = frozenset({"HardSigmoid", "AveragePool", "GlobalAveragePool", "ReduceMean"})
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
    rule = EXTENDED.get(node.op_type)
    if rule is None:
        indices: tuple[int, ...] = (0,)
    elif rule.data == EVERY_INPUT:
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
        return reader.op_type in POOLS
    if is_gain(reader):
        return True
    return maker.op_type in FUSING_PRODUCERS and reader.op_type in FUSING_CONSUMERS


def _is_float(value: ir.Value) -> bool:
    return value.dtype in FLOAT_TYPES
