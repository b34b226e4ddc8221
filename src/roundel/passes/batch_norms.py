"""Inference batch normalization, and its kin, as one multiplication and one addition per channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.model import graph
from roundel.model.edit import Attributes, Editor, rewrite
from roundel.model.layers import Layer, read_layer
from roundel.targets.operators import LAYERS

_EPSILON = 1e-5  # the default of the ONNX operator

_TRAINING_MODE_SINCE = 14
_TEST_MODE_UNTIL = 7


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """y = scale * x + shift for each channel, in double precision."""

    scale: NDArray[np.float64]
    shift: NDArray[np.float64]

    def part(self, start: int, stop: int) -> Affine:
        """The channels from `start` to `stop`."""
        return Affine(self.scale[start:stop], self.shift[start:stop])


def inference_affine(node: ir.Node, opset: int) -> Affine | None:
    """What a BatchNormalization does, if it is in inference mode and its parameters are constant."""
    if not graph.is_op(node, "BatchNormalization") or len(node.inputs) < 5 or not _is_inference(node, opset):
        return None
    arrays = [graph.real_constant(value) for value in node.inputs[1:5]]
    vectors = [array.astype(np.float64) for array in arrays if array is not None and array.ndim == 1]
    if len(vectors) != 4 or len({vector.size for vector in vectors}) != 1 or not vectors[0].size:
        # Without channels there is nothing to compute, and a convolution of no groups is not one.
        return None
    gamma, beta, mean, variance = vectors
    spread = variance + graph.attribute_float(node, "epsilon", _EPSILON)
    if not np.all(spread > 0):
        return None
    scale = gamma / np.sqrt(spread)
    shift = beta - mean * scale
    return Affine(scale, shift) if np.all(np.isfinite(scale) & np.isfinite(shift)) else None


def constant_affine(node: ir.Node, layer: Layer) -> Affine | None:
    """What an Add or a Mul of one constant number per channel does to the output of a layer."""
    size = layer.outputs
    for value, other in graph.operands(node) if graph.is_op(node, "Add", "Mul") else ():
        array = graph.real_constant(other)
        if value is not layer.node.outputs[0] or array is None:
            continue
        numbers = per_channel(array, layer.stored.ndim, size)
        if numbers is None or not np.all(np.isfinite(numbers)):
            return None
        if node.op_type == "Add":
            return Affine(np.ones(size), numbers)
        return Affine(numbers, np.zeros(size))
    return None


def per_channel(array: NDArray[np.generic], ndim: int, size: int) -> NDArray[np.float64] | None:
    """The constant as one number per channel, if broadcasting repeats it along everything else."""
    if array.ndim > ndim:
        return None
    shape = (1,) * (ndim - array.ndim) + array.shape
    if any(dim != 1 for axis, dim in enumerate(shape) if axis != 1) or shape[1] not in (1, size):
        return None
    return np.broadcast_to(array.reshape(-1), (size,)).astype(np.float64)


def _is_inference(node: ir.Node, opset: int) -> bool:
    if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
        return False
    if graph.attribute_int(node, "spatial", 1) != 1:
        return False
    if opset >= _TRAINING_MODE_SINCE:
        return graph.attribute_int(node, "training_mode", 0) == 0
    if opset < _TEST_MODE_UNTIL:
        return graph.attribute_int(node, "is_test", 0) != 0
    # In between, a node that asks for the running statistics is in training.
    return len([value for value in node.outputs if value.name]) == 1


def foldable(value: ir.Value | None) -> Layer | None:
    """The layer that makes a value, where its constants can absorb a map of its output channels."""
    node = graph.producer(value, *LAYERS)
    layer = None if node is None else read_layer(node)
    if layer is None or not is_constant_layer(layer.node):
        return None
    # Two-dimensional on both sides, a MatMul is a Gemm; with more dimensions channels are not second.
    return layer if layer.op != "MatMul" or graph.rank(layer.node.inputs[0]) == 2 else None


def is_constant_layer(node: ir.Node) -> bool:
    """Whether the weight, and the bias where there is one, are constants."""
    return all(value is None or graph.real_constant(value) is not None for value in node.inputs[1:3])


def can_absorb(layer: Layer, reader: ir.Node, affine: Affine) -> bool:
    """Whether `reader` alone sees the output of the layer, channels agree, and 16 bits hold the result."""
    if graph.only_reader(layer.node.outputs[0]) is not reader or layer.outputs != affine.scale.size:
        return False
    return layer.stored.dtype != np.float16 or all(map(_finite, _absorbed(layer, affine)))


def _finite(array: NDArray[Any]) -> bool:
    return bool(np.all(np.isfinite(array)))


def absorb(editor: Editor, layer: Layer, affine: Affine) -> ir.Node:
    """Change the weights of a layer so that it applies the affine map too; return its node."""
    scaled, bias = _absorbed(layer, affine)
    node = layer.node
    if layer.op == "MatMul":
        node = editor.replace(node, "Gemm", node.inputs, {})
    node.attributes.pop("beta", None)
    editor.set_constant(node, 1, scaled, f"{layer.name}_weight")
    editor.set_constant(node, 2, bias, f"{layer.name}_bias")
    return node


def _absorbed(layer: Layer, affine: Affine) -> tuple[NDArray[Any], NDArray[Any]]:
    """The new weight and bias, rounded to the type of the weight."""
    weight = layer.stored
    blocks = layer.blocks(weight.astype(np.float64))
    scaled = layer.unblocked(blocks * affine.scale.reshape(len(blocks), -1, 1, 1), weight.shape)
    with np.errstate(over="ignore"):
        return scaled.astype(weight.dtype), _new_bias(layer, affine).astype(weight.dtype)


def _new_bias(layer: Layer, affine: Affine) -> NDArray[np.float64]:
    bias = graph.real_constant(graph.input_at(layer.node, 2))
    if bias is None:
        return affine.shift
    bias = bias.astype(np.float64)
    if layer.op == "Gemm":
        bias = bias * layer.beta
        # A bias of one row, or of one number, stays one row; one that varies by row keeps its rows.
        rows = bias.shape[0] if bias.ndim == 2 else 1
        bias = np.broadcast_to(bias, (rows, affine.scale.size))
        bias = bias[0] if rows == 1 else bias
    return np.asarray(bias * affine.scale + affine.shift)


_RANKS = (3, 4, 5)  # what ONNX Runtime convolves


def batch_norm_to_conv(model: ir.Model) -> int:
    """Replaces BatchNormalization by a depthwise convolution with a kernel of size 1.

    Tolerance: scale and shift are computed in double precision and rounded once. Inputs of three to five
    dimensions whose rank is known are converted; others, and training mode, are left alone.
    """
    return rewrite(model, _convert, "BatchNormalization")


def _convert(editor: Editor, node: ir.Node) -> bool:
    affine = inference_affine(node, editor.opset)
    if affine is None:
        return False
    gamma = graph.real_constant(node.inputs[1])
    shape = graph.dims(node.inputs[0])
    if gamma is None or shape is None or len(shape) not in _RANKS:
        return False
    spatial, count = len(shape) - 2, affine.scale.size
    base = node.name or node.outputs[0].name or "BatchNormalization"
    kernel = affine.scale.astype(gamma.dtype).reshape(count, 1, *(1,) * spatial)
    weight = editor.initializer(f"{base}_weight", kernel)
    bias = editor.initializer(f"{base}_bias", affine.shift.astype(np.dtype(gamma.dtype)))
    sizes = dict.fromkeys(("kernel_shape", "strides", "dilations"), (1,) * spatial)
    attributes: Attributes = {"group": count, **sizes, "pads": (0,) * (2 * spatial)}
    editor.replace(node, "Conv", [node.inputs[0], weight, bias], attributes)
    return True


def fold_batch_norm(model: ir.Model) -> int:
    """Folds BatchNormalization into Conv, ConvTranspose, Gemm or a flat MatMul, or into all of them
    before a Concat of channels.

    An Add or a Mul of one constant number per channel is folded likewise: some exporters write the bias
    of a convolution so, and a normalization may stand behind it.

    Tolerance: weights and biases are computed in double precision and rounded once, so outputs agree to
    about 1e-6 of their scale in 32-bit floats. Only inference mode is folded, and only where the
    normalization is the one reader of the layer's output. The layer takes over the output's name.
    """
    return rewrite(model, _fold_affine, "BatchNormalization", "Add", "Mul")


def _fold_affine(editor: Editor, node: ir.Node) -> bool:
    if graph.is_op(node, "Add", "Mul"):
        layer = next(filter(None, map(foldable, node.inputs)), None)
        return layer is not None and _fold_into_layer(editor, node, layer, constant_affine(node, layer))
    affine = inference_affine(node, editor.opset)
    if affine is None:
        return False
    layer = foldable(node.inputs[0])
    return _fold_into_layer(editor, node, layer, affine) or _fold_into_branches(editor, node, affine)


def _fold_into_layer(editor: Editor, node: ir.Node, layer: Layer | None, affine: Affine | None) -> bool:
    if layer is None or affine is None or not can_absorb(layer, node, affine):
        return False
    changed = absorb(editor, layer, affine)
    editor.take_over(node.outputs[0], changed.outputs[0])
    editor.drop(node)
    return True


def _fold_into_branches(editor: Editor, norm: ir.Node, affine: Affine) -> bool:
    concat = graph.producer(norm.inputs[0], "Concat")
    if concat is None or graph.only_reader(concat.outputs[0]) is not norm:
        return False
    layers = [foldable(value) for value in concat.inputs]
    total = sum(layer.outputs for layer in layers if layer is not None)
    if not _joins_channels(concat) or total != affine.scale.size:
        return False
    branches: list[tuple[Layer, Affine]] = []
    start = 0
    for layer in layers:
        if layer is None:
            return False
        part = affine.part(start, start + layer.outputs)
        if not can_absorb(layer, concat, part):
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
    axis = graph.attribute_int(concat, "axis", 1)
    shape = concat.outputs[0].shape
    return axis == 1 or (axis < 0 and shape is not None and axis + len(shape) == 1)


def fold_pad(model: ir.Model) -> int:
    """Moves a constant Pad with zeros over spatial axes into the `pads` of the Conv behind it. Exact."""
    return rewrite(model, _fold, "Pad")


def _fold(editor: Editor, node: ir.Node) -> bool:
    source = graph.input_at(node, 0)
    reader = graph.only_reader(node.outputs[0])
    if source is None or reader is None or not graph.is_op(reader, "Conv"):
        return False
    if reader.inputs[0] is not node.outputs[0]:
        return False
    if graph.attribute_string(reader, "auto_pad", "NOTSET") != "NOTSET" or not _pads_with_zero(node):
        return False
    extra = _spatial_pads(node, len(graph.dims(node.outputs[0]) or graph.dims(source) or ()))
    if extra is None:
        return False
    own = graph.attribute_ints(reader, "pads") or (0,) * len(extra)
    if len(own) != len(extra):
        return False
    total = [a + b for a, b in zip(own, extra, strict=True)]
    reader.attributes["pads"] = ir.AttrInt64s("pads", total)
    reader.replace_input_with(0, source)
    editor.drop(node)
    return True


def _pads_with_zero(node: ir.Node) -> bool:
    if graph.attribute_string(node, "mode", "constant") != "constant":
        return False
    filler = graph.input_at(node, 2)
    if filler is None:
        return True
    array = graph.constant_array(filler)
    return array is not None and not array.any()


def _spatial_pads(node: ir.Node, ndim: int) -> list[int] | None:
    """Begin and end for each spatial axis; None where another axis is padded or anything is cropped."""
    pads, axes = graph.integers(graph.input_at(node, 1)), graph.integers(graph.input_at(node, 3))
    if pads is None or ndim < 3 or (axes is None and graph.input_at(node, 3) is not None):
        return None
    where = [axis % ndim for axis in axes] if axes is not None else list(range(ndim))
    if len(pads) != 2 * len(where) or min(pads) < 0:
        return None
    begin = dict(zip(where, pads[: len(where)], strict=True))
    end = dict(zip(where, pads[len(where) :], strict=True))
    if any(side.get(axis, 0) for side in (begin, end) for axis in (0, 1)):
        return None
    return [side.get(axis, 0) for side in (begin, end) for axis in range(2, ndim)]
