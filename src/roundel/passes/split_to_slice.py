"""Split as one Slice for each part."""

from __future__ import annotations

from itertools import accumulate
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from roundel.passes.base import Pass
from roundel.passes.rewriting import Editor, dims, get_int, get_ints, input_at, integers, is_op

_SLICE_TAKES_INPUTS_SINCE = 10


class SplitToSlice(Pass):
    """Replaces each Split whose sizes are known by Slice nodes. Exact.

    Parts that nobody reads get no Slice. A Split whose sizes are not known is left alone.
    """

    name: ClassVar[str] = "split to slice"
    reads_shapes: ClassVar[bool] = True

    def __call__(self, model: ir.Model) -> int:
        editor = Editor(model)
        return sum(_convert(editor, node) for node in model.graph if is_op(node, "Split"))


def _sizes(node: ir.Node, size: int | None) -> tuple[int, ...] | None:
    """Sizes of the parts, or None where they are not known."""
    sizes = get_ints(node, "split")
    if sizes is None and input_at(node, 1) is not None:
        sizes = integers(node.inputs[1])
        if sizes is None:
            return None
    count = len(node.outputs)
    if sizes is None and size is not None:
        # Equal parts, of which the last may be smaller (num_outputs, since opset 18).
        chunk = -(-size // count)
        sizes = (chunk,) * (count - 1) + (size - chunk * (count - 1),)
    if sizes is None or len(sizes) != count or min(sizes) < 0:
        return None
    return sizes if size is None or sum(sizes) == size else None


def _convert(editor: Editor, node: ir.Node) -> bool:
    source = input_at(node, 0)
    axis = get_int(node, "axis", 0)
    shape = dims(source)
    in_range = shape is not None and -len(shape) <= axis < len(shape)
    sizes = _sizes(node, shape[axis] if shape is not None and in_range else None)
    if source is None or sizes is None:
        return False
    base = node.name or node.outputs[0].name or "Split"
    for index, stop in enumerate(accumulate(sizes)):
        output = node.outputs[index]
        if not output.uses() and not output.is_graph_output():
            continue
        ranges = {"starts": stop - sizes[index], "ends": stop, "axes": axis}
        name = f"{base}_{index}"
        if editor.opset >= _SLICE_TAKES_INPUTS_SINCE:
            bounds = [editor.initializer(f"{name}_{key}", np.array([n])) for key, n in ranges.items()]
            part = editor.insert(node, "Slice", [source, *bounds], {}, name)
        else:
            part = editor.insert(node, "Slice", [source], {key: (n,) for key, n in ranges.items()}, name)
        editor.take_over(output, part)
    editor.drop(node)
    return True
