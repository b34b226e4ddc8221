"""Images come and go with their channels last."""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from roundel.passes.base import Pass
from roundel.passes.rewriting import Editor

_TO_NCHW = (0, 3, 1, 2)
_TO_NHWC = (0, 2, 3, 1)


class NchwToNhwc(Pass):
    """Changes the layout of four-dimensional graph inputs and outputs from NCHW to NHWC. Exact.

    Names stay; shapes change with the layout, and the caller feeds and reads NHWC from then on. Inside,
    a Transpose at each such input and output leaves the rest of the graph as it was.
    """

    name: ClassVar[str] = "nchw to nhwc"
    reads_shapes: ClassVar[bool] = True

    def __call__(self, model: ir.Model) -> int:
        editor = Editor(model)
        outputs = [v for v in dict.fromkeys(model.graph.outputs) if _is_image(v) and not v.is_graph_input()]
        inputs = [v for v in model.graph.inputs if _is_image(v) and not v.is_initializer()]
        for value in outputs:
            _turn_output(editor, value)
        for value in inputs:
            _turn_input(editor, value)
        return len(outputs) + len(inputs)


def _is_image(value: ir.Value) -> bool:
    return value.shape is not None and len(value.shape) == 4


def _turn_input(editor: Editor, value: ir.Value) -> None:
    assert value.shape is not None, "checked by _is_image"
    inner = ir.node("Transpose", [value], {"perm": _TO_NCHW}, name=editor.fresh(f"{value.name}_to_nchw"))
    turned = inner.outputs[0]
    turned.name = editor.fresh(f"{value.name}_nchw")
    turned.shape, turned.type = value.shape, value.type
    # Graph outputs that are this very input turn with it, and stay.
    for use in value.uses():
        if use.node is not inner:
            use.node.replace_input_with(use.idx, turned)
    value.shape = ir.Shape([value.shape[axis] for axis in _TO_NHWC])
    first = next(iter(editor.graph), None)
    if first is None:
        editor.graph.append(inner)
    else:
        first.prepend(inner)


def _turn_output(editor: Editor, value: ir.Value) -> None:
    assert value.shape is not None, "checked by _is_image"
    name = value.name
    turn = ir.node("Transpose", [value], {"perm": _TO_NHWC}, name=editor.fresh(f"{name}_to_nhwc"))
    turned = turn.outputs[0]
    for index, output in enumerate(editor.graph.outputs):
        if output is value:
            editor.graph.outputs[index] = turned
    value.name = editor.fresh(f"{name}_nchw")
    turned.name = name
    turned.type = value.type
    turned.shape = ir.Shape([value.shape[axis] for axis in _TO_NHWC])
    editor.graph.append(turn)
