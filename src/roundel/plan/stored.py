"""Which stored tensor a node really reads or makes, looking through pairs that fuse."""

from __future__ import annotations

from collections.abc import Container

import onnx_ir as ir

from roundel.model.graph import only_reader
from roundel.targets.operators import FUSING_CONSUMERS, POOLS


def stored_output(node: ir.Node, stored: Container[str]) -> str | None:
    """The quantized tensor that holds the node's result: its own, or that of the activation behind it."""
    if not node.outputs:
        return None
    value = node.outputs[0]
    if value.name in stored:
        return str(value.name)
    reader = only_reader(value)
    if reader is None or not (reader.op_type in FUSING_CONSUMERS or reader.op_type in POOLS):
        return None
    if reader.op_type in POOLS and node.op_type != "Pad":
        return None
    after = reader.outputs[0].name
    return str(after) if after in stored else None


def stored_input(value: ir.Value | None, stored: Container[str]) -> str | None:
    """The quantized tensor behind a value: itself, or the input of the Pad that makes it."""
    if value is None:
        return None
    if value.name in stored:
        return str(value.name)
    maker = value.producer()
    if maker is not None and maker.op_type == "Pad" and maker.inputs[0] is not None:
        before = maker.inputs[0].name
        return str(before) if before in stored else None
    return None
