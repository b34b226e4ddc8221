"""Global pools too large for the hardware, in two steps."""

from __future__ import annotations

import math
from typing import ClassVar

import onnx_ir as ir

from roundel.passes.base import Pass
from roundel.passes.rewriting import Editor, dims, input_at, is_op

# Elements that the pooling engine of the NPU can average at once.
_LIMIT = 512


class SplitLargePools(Pass):
    """Splits a GlobalAveragePool over more than 512 elements into AveragePool and GlobalAveragePool.

    The first kernel is, for each dimension, the largest factor up to its square root. A pool of which a
    part would still be too large stays whole. Tolerance: the order of the sum, about 1e-6.
    """

    name: ClassVar[str] = "split large pools"
    reads_shapes: ClassVar[bool] = True

    def __call__(self, model: ir.Model) -> int:
        editor = Editor(model)
        return sum(_split(editor, node) for node in model.graph if is_op(node, "GlobalAveragePool"))


def _split(editor: Editor, node: ir.Node) -> bool:
    source = input_at(node, 0)
    shape = dims(source)
    if shape is None or len(shape) != 4 or 0 in shape:
        return False
    height, width = shape[2], shape[3]
    if not height or not width or not _LIMIT < height * width <= _LIMIT**2:
        return False
    kernel = (_near_root(height), _near_root(width))
    first = math.prod(kernel)
    if first == 1 or first > _LIMIT or height * width // first > _LIMIT:
        return False
    base = node.name or node.outputs[0].name or "GlobalAveragePool"
    attributes = {"kernel_shape": kernel, "strides": kernel, "pads": (0, 0, 0, 0)}
    part = editor.insert(node, "AveragePool", [source], attributes, f"{base}_part")
    node.replace_input_with(0, part)
    return True


def _near_root(size: int) -> int:
    return next(factor for factor in range(math.isqrt(size), 0, -1) if size % factor == 0)
