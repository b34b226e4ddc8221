"""Put the bound of a ReLU6 at the top of a power-of-two range."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from roundel.passes.base import Pass
from roundel.passes.rewriting import Editor, get_int, input_at, is_op, only_reader, real_constant, scalar

_TOP = 127  # the largest code of a symmetric 8-bit type
_LAYERS = ("Conv", "ConvTranspose", "Gemm")
_CARRIERS = (
    "Pad",
    "MaxPool",
    "AveragePool",
    "GlobalAveragePool",
    "Reshape",
    "Flatten",
    "Transpose",
    "Squeeze",
)


class ScaleClipBounds(Pass):
    """Rescales a layer and its readers so that the Clip between them ends at 127 * 2**-k.

    min(max(x, 0), m) * f = min(max(f x, 0), f m): the layer before is multiplied by f, the layers behind
    are divided by it, and nothing else sees the difference. The quantizer's saturation can then do the
    work of the Clip, and the codes above the bound are not wasted. Tolerance: rounding of the weights in
    float32, about 1e-6.
    """

    name: ClassVar[str] = "scale clip bounds"

    def __call__(self, model: ir.Model) -> int:
        editor = Editor(model)
        return sum(_rescale(editor, node) for node in list(model.graph) if is_op(node, "Clip"))


def rescalable(node: ir.Node) -> list[ir.Node] | None:
    """The layers behind a Clip to [0, m] that can be rescaled together with the layer before it."""
    maker = node.inputs[0].producer() if node.inputs[0] is not None else None
    if maker is None or not is_op(maker, *_LAYERS) or only_reader(maker.outputs[0]) is not node:
        return None
    if scalar(input_at(node, 1)) != 0 or not (scalar(input_at(node, 2)) or 0) > 0:
        return None
    if not _constant_layer(maker) or _depthwise(maker):
        return None
    return _layers_behind(node.outputs[0])


def _depthwise(node: ir.Node) -> bool:
    """The NPU knows the pair of depthwise Conv and ReLU6 as it is, and no other bound for it."""
    weight = input_at(node, 1)
    group = get_int(node, "group", 1)
    return group > 1 and weight is not None and weight.shape is not None and weight.shape[1] == 1


def _rescale(editor: Editor, node: ir.Node) -> bool:
    behind = rescalable(node)
    if not behind:
        return False
    bound = scalar(node.inputs[2])
    maker = node.inputs[0].producer() if node.inputs[0] is not None else None
    assert bound is not None
    assert maker is not None
    target = _TOP * 2.0 ** math.ceil(math.log2(bound / _TOP))
    factor = target / bound
    if factor == 1.0:
        return False
    for index in (1, 2):
        _multiply(editor, maker, index, factor)
    for layer in behind:
        _multiply(editor, layer, 1, 1 / factor)
    editor.set_constant(node, 2, np.asarray(target, np.float32), "bound")
    return True


def _multiply(editor: Editor, layer: ir.Node, index: int, factor: float) -> None:
    array = real_constant(input_at(layer, index))
    if array is not None:
        scaled = (array.astype(np.float64) * factor).astype(array.dtype)
        editor.set_constant(layer, index, scaled, "weight" if index == 1 else "bias")


def _constant_layer(node: ir.Node) -> bool:
    bias = input_at(node, 2)
    return real_constant(input_at(node, 1)) is not None and (bias is None or real_constant(bias) is not None)


def _layers_behind(value: ir.Value) -> list[ir.Node] | None:
    """Every layer that reads it, through operators that scale along; None where another reads it, too."""
    found: list[ir.Node] = []
    stack = [value]
    while stack:
        current = stack.pop()
        if current.is_graph_output():
            return None
        for use in current.uses():
            node = use.node
            if use.idx != 0 or node.graph is not value.graph:
                return None
            if is_op(node, *_LAYERS) and real_constant(input_at(node, 1)) is not None:
                found.append(node)
            elif is_op(node, *_CARRIERS) and _zero_pad(node):
                stack.extend(node.outputs)
            else:
                return None
    return found


def _zero_pad(node: ir.Node) -> bool:
    filler = input_at(node, 2) if node.op_type == "Pad" else None
    return filler is None or scalar(filler) == 0
