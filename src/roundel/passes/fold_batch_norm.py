"""Batch normalization and constant factors disappear into the layer before them."""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from roundel.passes.base import Pass
from roundel.passes.batch_norms import Affine, absorb, can_absorb, channels, constant_affine, inference_affine
from roundel.passes.rewriting import Editor, get_int, is_op, only_reader, producer

_LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


class FoldBatchNorm(Pass):
    """Folds BatchNormalization into Conv, ConvTranspose, Gemm or a flat MatMul, or into all of them
    before a Concat of channels.

    An Add or a Mul of one constant number per channel is folded likewise: some exporters write the bias
    of a convolution so, and a normalization may stand behind it.

    Tolerance: weights and biases are computed in double precision and rounded once, so outputs agree to
    about 1e-6 of their scale in 32-bit floats. Only inference mode is folded, and only where the
    normalization is the one reader of the layer's output. The layer takes over the output's name.
    """

    name: ClassVar[str] = "fold batch norm"
    reads_shapes: ClassVar[bool] = True

    def __call__(self, model: ir.Model) -> int:
        editor = Editor(model)
        count = 0
        for node in model.graph:
            affine = inference_affine(node, editor.opset)
            if affine is not None:
                layer = producer(node.inputs[0], *_LAYERS)
                count += _fold_into_layer(editor, node, layer, affine) or _fold_into_branches(
                    editor, node, affine
                )
            elif is_op(node, "Add", "Mul"):
                count += _fold_constant(editor, node)
        return count


def _fold_constant(editor: Editor, node: ir.Node) -> bool:
    for value in node.inputs:
        layer = producer(value, *_LAYERS)
        size = None if layer is None else channels(layer)
        if layer is not None and size is not None:
            return _fold_into_layer(editor, node, layer, constant_affine(node, layer, size))
    return False


def _fold_into_layer(editor: Editor, node: ir.Node, layer: ir.Node | None, affine: Affine | None) -> bool:
    if layer is None or affine is None or not can_absorb(layer, node, affine):
        return False
    layer = absorb(editor, layer, affine)
    editor.take_over(node.outputs[0], layer.outputs[0])
    editor.drop(node)
    return True


def _fold_into_branches(editor: Editor, norm: ir.Node, affine: Affine) -> bool:
    concat = producer(norm.inputs[0], "Concat")
    if concat is None or only_reader(concat.outputs[0]) is not norm:
        return False
    layers = [producer(value, *_LAYERS) for value in concat.inputs]
    sizes = [None if layer is None else channels(layer) for layer in layers]
    if not _joins_channels(concat) or sum(size or 0 for size in sizes) != affine.scale.size:
        return False
    branches: list[tuple[ir.Node, Affine]] = []
    start = 0
    for layer, size in zip(layers, sizes, strict=True):
        part = affine.part(start, start + (size or 0))
        if layer is None or not can_absorb(layer, concat, part):
            return False
        branches.append((layer, part))
        start += part.scale.size
    for layer, part in branches:
        changed = absorb(editor, layer, part).outputs[0]
        # The value is a new one, and must not be taken for the old.
        changed.name = editor.fresh(f"{changed.name}_normalized")
    editor.take_over(norm.outputs[0], concat.outputs[0])
    editor.drop(norm)
    return True


def _joins_channels(concat: ir.Node) -> bool:
    axis = get_int(concat, "axis", 1)
    shape = concat.outputs[0].shape
    return axis == 1 or (axis < 0 and shape is not None and axis + len(shape) == 1)
