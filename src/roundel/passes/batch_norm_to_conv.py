"""A batch normalization that stands alone becomes a depthwise convolution."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import onnx_ir as ir

from roundel.passes.base import Pass
from roundel.passes.batch_norms import inference_affine
from roundel.passes.rewriting import Editor, dims, real_constant

_RANKS = (3, 4, 5)  # what ONNX Runtime convolves


class BatchNormToConv(Pass):
    """Replaces BatchNormalization by a depthwise convolution with a kernel of size 1.

    Tolerance: scale and shift are computed in double precision and rounded once. Inputs of three to five
    dimensions whose rank is known are converted; others, and training mode, are left alone.
    """

    name: ClassVar[str] = "batch norm to conv"
    reads_shapes: ClassVar[bool] = True

    def __call__(self, model: ir.Model) -> int:
        editor = Editor(model)
        return sum(_convert(editor, node) for node in model.graph)


def _convert(editor: Editor, node: ir.Node) -> bool:
    affine = inference_affine(node, editor.opset)
    if affine is None:
        return False
    gamma = real_constant(node.inputs[1])
    shape = dims(node.inputs[0])
    if gamma is None or shape is None or len(shape) not in _RANKS:
        return False
    spatial, count = len(shape) - 2, affine.scale.size
    base = node.name or node.outputs[0].name or "BatchNormalization"
    weight = affine.scale.astype(gamma.dtype).reshape(count, 1, *(1,) * spatial)
    inputs = [
        node.inputs[0],
        editor.initializer(f"{base}_weight", weight),
        editor.initializer(f"{base}_bias", affine.shift.astype(np.dtype(gamma.dtype))),
    ]
    ones = (1,) * spatial
    attributes: dict[str, int | tuple[int, ...]] = {
        "group": count,
        "kernel_shape": ones,
        "strides": ones,
        "dilations": ones,
        "pads": (0,) * (2 * spatial),
    }
    editor.replace(node, "Conv", inputs, attributes)
    return True
