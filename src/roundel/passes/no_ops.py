"""Nodes that only hand their input on."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import onnx_ir as ir

from roundel.passes.base import Pass
from roundel.passes.rewriting import (
    Editor,
    constant,
    get_int,
    get_ints,
    input_at,
    integers,
    static_dims,
)

# Dropout has no training switch between these versions: it is the identity.
_DROPOUT_SWITCH_IN, _DROPOUT_SWITCH_OUT = 12, 7


class NoOps(Pass):
    """Removes nodes whose output is their first input, bit for bit. Exact.

    Identity, Dropout in inference, Cast to the same type, Transpose that keeps the order, Pad by zero,
    Reshape or Expand to the same known shape, and Concat of one tensor. A node stays where both its input
    and its output have names that callers rely on.
    """

    name: ClassVar[str] = "no-ops"
    reads_shapes: ClassVar[bool] = True

    def __call__(self, model: ir.Model) -> int:
        editor = Editor(model)
        return sum(_bypass(editor, node) for node in model.graph if _is_no_op(node, editor.opset))


def _is_no_op(node: ir.Node, opset: int) -> bool:
    source = input_at(node, 0)
    if node.domain != "" or source is None or not node.outputs:
        return False
    match node.op_type:
        case "Identity":
            return True
        case "Dropout":
            return _is_inference_dropout(node, opset)
        case "Cast":
            return source.dtype is not None and get_int(node, "to", -1) == source.dtype
        case "Transpose":
            perm = get_ints(node, "perm")
            return perm is not None and perm == tuple(range(len(perm)))
        case "Pad":
            pads = get_ints(node, "pads") if opset < 11 else integers(input_at(node, 1))
            return pads is not None and not any(pads)
        case "Reshape" | "Expand":
            shape = static_dims(source)
            return shape is not None and shape == static_dims(node.outputs[0])
        case "Concat":
            return len(node.inputs) == 1
    return False


def _is_inference_dropout(node: ir.Node, opset: int) -> bool:
    if any(mask.uses() or mask.is_graph_output() for mask in node.outputs[1:]):
        return False
    if opset >= _DROPOUT_SWITCH_IN:
        switch = input_at(node, 2)
        flag = constant(switch)
        return switch is None or (flag is not None and not np.any(flag))
    return opset >= _DROPOUT_SWITCH_OUT or get_int(node, "is_test", 0) != 0


def _bypass(editor: Editor, node: ir.Node) -> int:
    source, output = node.inputs[0], node.outputs[0]
    assert source is not None, "checked by _is_no_op"
    if not output.is_graph_output():
        if source.type is None:
            source.type = output.type
        output.replace_all_uses_with(source)
    elif source.producer() is None or source.is_graph_output() or source.graph is not editor.graph:
        return 0
    else:
        editor.take_over(output, source)
    editor.drop(node)
    return 1
