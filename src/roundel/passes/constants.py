"""Constant nodes become initializers."""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from roundel.passes.base import Pass
from roundel.passes.rewriting import Editor, is_op


class Constants(Pass):
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
