"""Constant nodes become initializers."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import onnx_ir as ir

from roundel.model.edit import Editor
from roundel.model.graph import (
    attribute_int,
    attribute_ints,
    constant_array,
    input_at,
    integers,
    is_op,
    static_shape,
)
from roundel.passes.base import Pass


class LiftConstants(Pass):
    """Turns Constant nodes into initializers of the same name. Exact.

    A constant that is itself a graph output stays a node, and so does a sparse one.
    """

    name: ClassVar[str] = "constants to initializers"

    def __call__(self, model: ir.Model) -> int:
        editor = Editor(model)
        count = 0
        for node in model.graph:
            if not is_op(node, "Constant") or node.outputs[0].is_graph_output():
                continue
            tensor = ir.convenience.get_const_tensor(node.outputs[0])
            if tensor is None:
                continue
            to_initializer(editor, node.outputs[0], tensor)
            editor.drop(node)
            count += 1
        return count


def to_initializer(editor: Editor, value: ir.Value, tensor: ir.TensorProtocol) -> None:
    """Put an initializer with this content where a computed value stood, under its name."""
    name = value.name or editor.fresh("constant")
    value.name = None
    tensor.name = name
    fixed = ir.Value(name=name, const_value=tensor)
    fixed.shape = ir.Shape(tensor.shape.numpy())
    fixed.dtype = tensor.dtype
    fixed.metadata_props.update(value.metadata_props)
    value.replace_all_uses_with(fixed)
    editor.graph.register_initializer(fixed)


class DeadCode(Pass):
    """Removes nodes, initializers and functions that no graph output depends on. Exact."""

    name: ClassVar[str] = "dead code"

    def __call__(self, model: ir.Model) -> int:
        editor = Editor(model)
        count = 0
        # Readers come after what they read, so one walk from the end meets every reader first.
        for node in reversed(model.graph):
            if not any(value.uses() or value.is_graph_output() for value in node.outputs):
                editor.drop(node)
                count += 1
        return count + _remove_initializers(model.graph) + _remove_functions(model)


def _remove_initializers(graph: ir.Graph) -> int:
    unused = [
        name
        for name, value in graph.initializers.items()
        if not (value.uses() or value.is_graph_output() or value.is_graph_input())
    ]
    for name in unused:
        del graph.initializers[name]
    return len(unused)


def _remove_functions(model: ir.Model) -> int:
    pending = {node.op_identifier() for node in model.graph.all_nodes()} & set(model.functions)
    called = set(pending)
    while pending:
        body = model.functions[pending.pop()]
        inner = {node.op_identifier() for node in body.all_nodes()} & set(model.functions)
        pending |= inner - called
        called |= inner
    unused = [key for key in model.functions if key not in called]
    for key in unused:
        del model.functions[key]
    return len(unused)


# From this version on, an initializer need not be a graph input.
_FIRST_IR_VERSION = 4


class InitializerInputs(Pass):
    """Makes initializers that are also graph inputs plain constants. Exact for their default values.

    Old exporters list every weight as an input. A weight that a caller may replace cannot be folded or
    quantized, and ONNX Runtime does not count it among the inputs of a session either.
    """

    name: ClassVar[str] = "initializer inputs"

    def __call__(self, model: ir.Model) -> int:
        graph = model.graph
        kept = [value for value in graph.inputs if not value.is_initializer()]
        removed = len(graph.inputs) - len(kept)
        if removed:
            graph.inputs.clear()
            graph.inputs.extend(kept)
            model.ir_version = max(model.ir_version, _FIRST_IR_VERSION)
        return removed


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


class UnshareBiases(Pass):
    """Copies a bias that several nodes read, one copy for each layer. Exact.

    The scale of a bias is that of its layer's input times that of its weight: two layers that share the
    numbers still need two scales.
    """

    name: ClassVar[str] = "unshare biases"

    def __call__(self, model: ir.Model) -> int:
        editor = Editor(model)
        count = 0
        for node in model.graph:
            if not is_op(node, "Conv", "ConvTranspose", "Gemm"):
                continue
            bias = input_at(node, 2)
            array = constant_array(bias)
            if bias is not None and array is not None and (len(bias.uses()) > 1 or bias.is_graph_output()):
                node.replace_input_with(2, editor.initializer(bias.name or "bias", array))
                count += 1
        return count


class UnshareWeights(Pass):
    """Copies a weight that several nodes read, one copy for each layer. Exact.

    The NPU's shift limits tie a weight's scale to its layer's input and output: two layers cannot always
    agree on one.
    """

    name: ClassVar[str] = "unshare weights"

    def __call__(self, model: ir.Model) -> int:
        editor = Editor(model)
        count = 0
        for node in model.graph:
            if not is_op(node, "Conv", "ConvTranspose", "Gemm"):
                continue
            weight = input_at(node, 1)
            array = constant_array(weight)
            if (
                weight is not None
                and array is not None
                and (len(weight.uses()) > 1 or weight.is_graph_output())
            ):
                node.replace_input_with(1, editor.initializer(weight.name or "weight", array))
                count += 1
        return count
