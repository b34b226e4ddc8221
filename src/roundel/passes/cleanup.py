"""What does nothing goes; constants become initializers, one for each layer."""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from roundel.model.edit import Editor, rewrite
from roundel.model.graph import (
    attribute_int,
    attribute_ints,
    constant_array,
    input_at,
    integers,
    static_shape,
)


def lift_constants(model: ir.Model) -> int:
    """Turns Constant nodes into initializers of the same name. Exact.

    A constant that is itself a graph output stays a node.
    """
    before = len(model.graph)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    return before - len(model.graph)


def remove_dead_code(model: ir.Model) -> int:
    """Removes nodes, initializers and functions that no graph output depends on. Exact.

    onnx-ir's pass for nodes forgets what the body of a removed node read, and empties outputs of others.
    """
    editor, before = Editor(model), _size(model)
    # Readers come after what they read, so one walk from the end meets every reader first.
    for node in reversed(model.graph):
        if not any(value.uses() or value.is_graph_output() for value in node.outputs):
            editor.drop(node)
    for name, value in list(model.graph.initializers.items()):
        if not (value.uses() or value.is_graph_output() or value.is_graph_input()):
            del model.graph.initializers[name]
    common.RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
    return before - _size(model)


def _size(model: ir.Model) -> int:
    return len(model.graph) + len(model.graph.initializers) + len(model.functions)


# Dropout has no training switch between these versions: it is the identity.
_DROPOUT_SWITCH_IN, _DROPOUT_SWITCH_OUT = 12, 7


def remove_no_ops(model: ir.Model) -> int:
    """Removes nodes whose output is their first input, bit for bit. Exact.

    Identity, Dropout in inference, Cast to the same type, Transpose that keeps the order, Pad by zero,
    Reshape or Expand to the same known shape, and Concat of one tensor. A node stays where both its input
    and its output have names that callers rely on.
    """
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
            return source.dtype is not None and attribute_int(node, "to", -1) == source.dtype
        case "Transpose":
            perm = attribute_ints(node, "perm")
            return perm is not None and perm == tuple(range(len(perm)))
        case "Pad":
            pads = attribute_ints(node, "pads") if opset < 11 else integers(input_at(node, 1))
            return pads is not None and not any(pads)
        case "Reshape" | "Expand":
            shape = static_shape(source)
            return shape is not None and shape == static_shape(node.outputs[0])
        case "Concat":
            return len(node.inputs) == 1
    return False


def _is_inference_dropout(node: ir.Node, opset: int) -> bool:
    if any(mask.uses() or mask.is_graph_output() for mask in node.outputs[1:]):
        return False
    if opset >= _DROPOUT_SWITCH_IN:
        switch = input_at(node, 2)
        flag = constant_array(switch)
        return switch is None or (flag is not None and not np.any(flag))
    return opset >= _DROPOUT_SWITCH_OUT or attribute_int(node, "is_test", 0) != 0


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


def unshare_biases(model: ir.Model) -> int:
    """Copies a bias that several nodes read, one copy for each layer. Exact.

    The scale of a bias is that of its layer's input times that of its weight: two layers that share the
    numbers still need two scales.
    """
    return rewrite(model, partial(_unshare, index=2), "Conv", "ConvTranspose", "Gemm")


def unshare_weights(model: ir.Model) -> int:
    """Copies a weight that several nodes read, one copy for each layer. Exact.

    The NPU's shift limits tie a weight's scale to its layer's input and output: two layers cannot always
    agree on one.
    """
    return rewrite(model, partial(_unshare, index=1), "Conv", "ConvTranspose", "Gemm")


def _unshare(editor: Editor, node: ir.Node, index: int) -> bool:
    value = input_at(node, index)
    array = constant_array(value)
    if value is None or array is None or not (len(value.uses()) > 1 or value.is_graph_output()):
        return False
    node.replace_input_with(index, editor.initializer(value.name or "constant", array))
    return True
