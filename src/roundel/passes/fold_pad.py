"""Zero padding in front of a convolution is the convolution's own padding."""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from roundel.passes.base import Pass
from roundel.passes.rewriting import (
    Editor,
    constant,
    dims,
    get_ints,
    get_string,
    input_at,
    integers,
    is_op,
    only_reader,
)


class FoldPad(Pass):
    """Moves a constant Pad with zeros over spatial axes into the `pads` of the Conv behind it. Exact."""

    name: ClassVar[str] = "fold pad"
    reads_shapes: ClassVar[bool] = True

    def __call__(self, model: ir.Model) -> int:
        editor = Editor(model)
        return sum(_fold(editor, node) for node in list(model.graph) if is_op(node, "Pad"))


def _fold(editor: Editor, node: ir.Node) -> bool:
    source = input_at(node, 0)
    reader = only_reader(node.outputs[0])
    if (
        source is None
        or reader is None
        or not is_op(reader, "Conv")
        or reader.inputs[0] is not node.outputs[0]
    ):
        return False
    if get_string(reader, "auto_pad", "NOTSET") != "NOTSET" or not _pads_with_zero(node):
        return False
    rank = len(dims(node.outputs[0]) or dims(source) or ())
    extra = _spatial_pads(node, rank)
    if extra is None:
        return False
    own = get_ints(reader, "pads") or (0,) * len(extra)
    if len(own) != len(extra):
        return False
    total = [a + b for a, b in zip(own, extra, strict=True)]
    reader.attributes["pads"] = ir.AttrInt64s("pads", total)
    reader.replace_input_with(0, source)
    editor.drop(node)
    return True


def _pads_with_zero(node: ir.Node) -> bool:
    if get_string(node, "mode", "constant") != "constant":
        return False
    filler = input_at(node, 2)
    if filler is None:
        return True
    array = constant(filler)
    return array is not None and not array.any()


def _spatial_pads(node: ir.Node, rank: int) -> list[int] | None:
    """Begin and end for each spatial axis; None where another axis is padded or anything is cropped."""
    pads, axes = integers(input_at(node, 1)), integers(input_at(node, 3))
    if pads is None or rank < 3 or (axes is None and input_at(node, 3) is not None):
        return None
    where = [axis % rank for axis in axes] if axes is not None else list(range(rank))
    if len(pads) != 2 * len(where) or min(pads) < 0:
        return None
    begin = dict(zip(where, pads[: len(where)], strict=True))
    end = dict(zip(where, pads[len(where) :], strict=True))
    if any(side.get(axis, 0) for side in (begin, end) for axis in (0, 1)):
        return None
    return [side.get(axis, 0) for side in (begin, end) for axis in range(2, rank)]
