"""The mean over height and width is global average pooling."""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from roundel.passes.base import Pass
from roundel.passes.rewriting import Editor, any_reduced_axes, dims, get_int, input_at, is_op

_FLOATS = frozenset({ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE})


class ReduceMeanToPool(Pass):
    """Replaces ReduceMean over the last two of four dimensions by GlobalAveragePool.

    Without keepdims, a Flatten follows. Tolerance: the order in which a runtime adds up, about 1e-6.
    """

    name: ClassVar[str] = "reduce mean to global average pool"
    reads_shapes: ClassVar[bool] = True

    def __call__(self, model: ir.Model) -> int:
        editor = Editor(model)
        return sum(_convert(editor, node) for node in model.graph if is_op(node, "ReduceMean"))


def _convert(editor: Editor, node: ir.Node) -> bool:
    source = input_at(node, 0)
    shape = dims(source)
    if source is None or shape is None or len(shape) != 4 or source.dtype not in _FLOATS:
        return False
    # Unlike a mean, a pool over an empty tensor is an error in ONNX Runtime.
    if any_reduced_axes(node, 4) != (2, 3) or 0 in shape:
        return False
    if get_int(node, "keepdims", 1):
        editor.replace(node, "GlobalAveragePool", [source], {})
    else:
        base = node.name or node.outputs[0].name or "ReduceMean"
        pooled = editor.insert(node, "GlobalAveragePool", [source], {}, f"{base}_pool")
        editor.replace(node, "Flatten", [pooled], {"axis": 1})
    return True
