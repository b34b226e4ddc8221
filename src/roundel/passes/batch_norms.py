"""Inference batch normalization, and its kin, as one multiplication and one addition per channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.model.edit import Editor, rewrite
from roundel.model.graph import (
    attribute_float,
    attribute_int,
    attribute_ints,
    attribute_string,
    constant_array,
    dims,
    input_at,
    integers,
    is_op,
    only_reader,
    operands,
    producer,
    real_constant,
)
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
    if not is_op(node, "BatchNormalization") or len(node.inputs) < 5 or not _is_inference(node, opset):
        return None
    arrays = [real_constant(value) for value in node.inputs[1:5]]
    vectors = [array.astype(np.float64) for array in arrays if array is not None and array.ndim == 1]
    if len(vectors) != 4 or len({vector.size for vector in vectors}) != 1 or not vectors[0].size:
        # Without channels there is nothing to compute, and a convolution of no groups is not one.
        return None
    gamma, beta, mean, variance = vectors
    spread = variance + attribute_float(node, "epsilon", _EPSILON)
    if not np.all(spread > 0):
        return None
    scale = gamma / np.sqrt(spread)
    shift = beta - mean * scale
    return Affine(scale, shift) if np.all(np.isfinite(scale) & np.isfinite(shift)) else None


def constant_affine(node: ir.Node, layer: ir.Node, size: int) -> Affine | None:
    """What an Add or a Mul of one constant number per channel does to the output of a layer."""
    for value, other in operands(node) if is_op(node, "Add", "Mul") else ():
        array = real_constant(other)
        if value is not layer.outputs[0] or array is None:
            continue
        numbers = per_channel(array, _output_rank(layer), size)
        if numbers is None or not np.all(np.isfinite(numbers)):
            return None
        if node.op_type == "Add":
            return Affine(np.ones(size), numbers)
        return Affine(numbers, np.zeros(size))
    return None


def _output_rank(layer: ir.Node) -> int:
    weight = real_constant(layer.inputs[1])
    assert weight is not None, "checked by channels()"
    return weight.ndim


def per_channel(array: NDArray[np.generic], rank: int, size: int) -> NDArray[np.float64] | None:
    """The constant as one number per channel, if broadcasting repeats it along everything else."""
    if array.ndim > rank:
        return None
    shape = (1,) * (rank - array.ndim) + array.shape
    if any(dim != 1 for axis, dim in enumerate(shape) if axis != 1) or shape[1] not in (1, size):
        return None
    return np.broadcast_to(array.reshape(-1), (size,)).astype(np.float64)


def _is_inference(node: ir.Node, opset: int) -> bool:
    if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
        return False
    if attribute_int(node, "spatial", 1) != 1:
        return False
    if opset >= _TRAINING_MODE_SINCE:
        return attribute_int(node, "training_mode", 0) == 0
    if opset < _TEST_MODE_UNTIL:
        return attribute_int(node, "is_test", 0) != 0
    # In between, a node that asks for the running statistics is in training.
    return len([value for value in node.outputs if value.name]) == 1


def channels(layer: ir.Node) -> int | None:
    """Output channels of a layer with constant weights; None for anything that cannot absorb."""
    weight = real_constant(input_at(layer, 1))
    if (
        weight is None
        or not weight.size
        or (len(layer.inputs) > 2 and layer.inputs[2] is not None and _bias(layer) is None)
    ):
        return None
    match layer.op_type if layer.domain == "" else "":
        case "Conv":
            return int(weight.shape[0])
        case "ConvTranspose":
            return int(weight.shape[1]) * attribute_int(layer, "group", 1)
        case "Gemm":
            return int(weight.shape[0 if attribute_int(layer, "transB", 0) else 1])
        case "MatMul":
            # Two-dimensional on both sides, it is a Gemm; with more dimensions channels are not last.
            source = input_at(layer, 0)
            flat = source is not None and source.shape is not None and len(source.shape) == 2
            return int(weight.shape[1]) if flat and weight.ndim == 2 else None
    return None


def can_absorb(layer: ir.Node, reader: ir.Node, affine: Affine) -> bool:
    """Whether `reader` alone sees the output of the layer, channels agree, and 16 bits hold the result."""
    if only_reader(layer.outputs[0]) is not reader or channels(layer) != affine.scale.size:
        return False
    weight = real_constant(layer.inputs[1])
    if weight is None or weight.dtype != np.float16:
        return weight is not None
    return all(np.all(np.isfinite(array)) for array in _absorbed(layer, weight, affine))


def absorb(editor: Editor, layer: ir.Node, affine: Affine) -> ir.Node:
    """Change the weights of a layer so that it applies the affine map too; return the layer."""
    weight = real_constant(layer.inputs[1])
    assert weight is not None, "checked by channels()"
    scaled, bias = _absorbed(layer, weight, affine)
    base = layer.name or layer.outputs[0].name or layer.op_type
    if layer.op_type == "MatMul":
        attributes: dict[str, int | float] = {}
        layer = editor.replace(layer, "Gemm", layer.inputs, attributes)
    elif layer.op_type == "Gemm":
        layer.attributes.pop("beta", None)
    editor.set_constant(layer, 1, scaled, f"{base}_weight")
    editor.set_constant(layer, 2, bias, f"{base}_bias")
    return layer


def _absorbed(layer: ir.Node, weight: NDArray[Any], affine: Affine) -> tuple[NDArray[Any], NDArray[Any]]:
    """The new weight and bias, rounded to the type of the weight."""
    scaled = weight.astype(np.float64) * _along_outputs(layer, weight, affine.scale)
    with np.errstate(over="ignore"):
        return scaled.astype(weight.dtype), _new_bias(layer, affine).astype(weight.dtype)


def _bias(layer: ir.Node) -> NDArray[np.float64] | None:
    array = real_constant(input_at(layer, 2))
    return None if array is None else array.astype(np.float64)


def _along_outputs(
    layer: ir.Node, weight: NDArray[np.generic], scale: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The scale, shaped to multiply the weight along its output channels."""
    spatial = (1,) * (weight.ndim - 2)
    match layer.op_type:
        case "Conv":
            return scale.reshape(-1, 1, *spatial)
        case "ConvTranspose":
            # Weights are [inputs, outputs of one group, ...]: each group of inputs has its own outputs.
            groups = attribute_int(layer, "group", 1)
            per_group = scale.reshape(groups, 1, -1)
            rows = np.repeat(per_group, weight.shape[0] // groups, axis=1)
            return rows.reshape(weight.shape[0], -1, *spatial)
        case "Gemm" if attribute_int(layer, "transB", 0):
            return scale.reshape(-1, 1)
    return scale.reshape(1, -1)


def _new_bias(layer: ir.Node, affine: Affine) -> NDArray[np.float64]:
    bias = _bias(layer)
    if bias is None:
        return affine.shift
    if layer.op_type == "Gemm":
        bias = bias * attribute_float(layer, "beta", 1.0)
        # A bias of one row, or of one number, stays one row; one that varies by row keeps its rows.
        rows = bias.shape[0] if bias.ndim == 2 else 1
        bias = np.broadcast_to(bias, (rows, affine.scale.size))
        bias = bias[0] if rows == 1 else bias
    return bias * affine.scale + affine.shift


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
    if is_op(node, "Add", "Mul"):
        return _fold_constant(editor, node)
    affine = inference_affine(node, editor.opset)
    if affine is None:
        return False
    layer = producer(node.inputs[0], *LAYERS)
    return _fold_into_layer(editor, node, layer, affine) or _fold_into_branches(editor, node, affine)


def _fold_constant(editor: Editor, node: ir.Node) -> bool:
    for value in node.inputs:
        layer = producer(value, *LAYERS)
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
    layers = [producer(value, *LAYERS) for value in concat.inputs]
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
    axis = attribute_int(concat, "axis", 1)
    shape = concat.outputs[0].shape
    return axis == 1 or (axis < 0 and shape is not None and axis + len(shape) == 1)


def fold_pad(model: ir.Model) -> int:
    """Moves a constant Pad with zeros over spatial axes into the `pads` of the Conv behind it. Exact."""
    return rewrite(model, _fold, "Pad")


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
    if attribute_string(reader, "auto_pad", "NOTSET") != "NOTSET" or not _pads_with_zero(node):
        return False
    rank = len(dims(node.outputs[0]) or dims(source) or ())
    extra = _spatial_pads(node, rank)
    if extra is None:
        return False
    own = attribute_ints(reader, "pads") or (0,) * len(extra)
    if len(own) != len(extra):
        return False
    total = [a + b for a, b in zip(own, extra, strict=True)]
    reader.attributes["pads"] = ir.AttrInt64s("pads", total)
    reader.replace_input_with(0, source)
    editor.drop(node)
    return True


def _pads_with_zero(node: ir.Node) -> bool:
    if attribute_string(node, "mode", "constant") != "constant":
        return False
    filler = input_at(node, 2)
    if filler is None:
        return True
    array = constant_array(filler)
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
