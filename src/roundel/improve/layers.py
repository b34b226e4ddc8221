"""Layers with constant weights: what they are computed from, and how the graph around them is edited."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from roundel.model.edit import Editor
from roundel.model.graph import (
    attribute_float,
    attribute_int,
    attribute_ints,
    constant_array,
    input_at,
    is_op,
    only_reader,
    operands,
    same_rank,
)
from roundel.plan.types import QuantPlan
from roundel.targets.operators import Trait, ops_with

_CONVS = ops_with(Trait.CONV)


@dataclass(frozen=True, slots=True)
class Layer:
    """A quantized layer with constant weights.

    Attributes:
        name: the node.
        op: its operator.
        data, weight, bias, output: the tensors around it (float graph's names).
        groups: number of independent groups.
        kernel, strides, dilations, begin: of a convolution; empty for a matrix product.
        transposed: Gemm's transB.
    """

    name: str
    op: str
    data: str
    weight: str
    bias: str | None
    output: str
    groups: int = 1
    kernel: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()
    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    transposed: bool = False

    def matrix(self, weight: NDArray[Any]) -> NDArray[Any]:
        """The weight tensor as (groups, outputs per group, inputs per output)."""
        if self.op == "Conv":
            return weight.reshape(self.groups, weight.shape[0] // self.groups, -1)
        if self.op == "ConvTranspose":
            split = weight.reshape(self.groups, weight.shape[0] // self.groups, *weight.shape[1:])
            flipped = _flipped(split, len(self.kernel))
            turned = np.moveaxis(flipped, 2, 1)
            return turned.reshape(self.groups, weight.shape[1], -1)
        return (weight if self.transposed else weight.T)[None]

    def tensor(self, matrix: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """The inverse of `matrix`."""
        if self.op == "Conv":
            return matrix.reshape(shape)
        if self.op == "ConvTranspose":
            split = matrix.reshape(self.groups, shape[1], shape[0] // self.groups, *self.kernel)
            flipped = _flipped(np.moveaxis(split, 1, 2), len(self.kernel))
            return np.ascontiguousarray(flipped.reshape(shape))
        return matrix[0] if self.transposed else np.ascontiguousarray(matrix[0].T)

    def places(self, shape: tuple[int, ...], most: int, rng: np.random.Generator) -> NDArray[np.intp]:
        """Up to `most` flat positions of an output of this shape, for one sample."""
        if self.op in _CONVS:
            count = shape[0] * int(np.prod(shape[2:]))
        else:
            count = int(np.prod(shape[:-1]))
        if count <= most:
            return np.arange(count)
        return np.sort(rng.choice(count, most, replace=False))

    def targets(self, output: NDArray[Any], places: NDArray[np.intp]) -> NDArray[np.float32]:
        """(n, groups, outputs per group) at the given places."""
        if self.op in _CONVS:
            # Gather from the channels-first layout: turning the whole tensor around costs far more.
            batch, where = np.divmod(places, int(np.prod(output.shape[2:])))
            rows = output.reshape(*output.shape[:2], -1)[batch, :, where]
        else:
            rows = output.reshape(-1, output.shape[-1])[places]
        return rows.reshape(len(places), self.groups, -1).astype(np.float32, copy=False)

    def inputs(
        self, data: NDArray[Any], places: NDArray[np.intp], spatial: tuple[int, ...], zero: int = 0
    ) -> NDArray[Any]:
        """(n, groups, inputs per output): what each place of the output is computed from.

        Args:
            data: the layer's input.
            places: flat positions of the output.
            spatial: height, width … of the output.
            zero: what means zero in the data, and so fills its padding.
        """
        if self.op not in _CONVS:
            return data.reshape(-1, data.shape[-1])[places][:, None]
        turned = self.op == "ConvTranspose"
        padded = self._stuffed(data, zero) if turned else self._padded(data, spatial, zero)
        extent = tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))
        axes = tuple(range(2, 2 + len(self.kernel)))
        windows: NDArray[Any] = sliding_window_view(padded, extent, axis=axes)
        steps = self.strides if self.op == "Conv" else (1,) * len(self.kernel)
        batch, *where = np.unravel_index(places, (data.shape[0], *spatial))
        index: Any = (batch, slice(None), *(w * s for w, s in zip(where, steps, strict=True)))
        sparse: Any = (..., *[slice(None, None, d) for d in self.dilations])
        picked: NDArray[Any] = windows[index][sparse]
        return picked.reshape(len(places), self.groups, -1)

    def _padded(self, data: NDArray[Any], spatial: tuple[int, ...], zero: int) -> NDArray[Any]:
        pads = [(0, 0), (0, 0)]
        for i, size in enumerate(spatial):
            extent = (self.kernel[i] - 1) * self.dilations[i] + 1
            needed = (size - 1) * self.strides[i] + extent
            end = max(self.end[i], needed - data.shape[2 + i] - self.begin[i], 0)
            pads.append((self.begin[i], end))
        return np.pad(data, pads, constant_values=zero) if any(p != (0, 0) for p in pads) else data

    def _stuffed(self, data: NDArray[Any], zero: int) -> NDArray[Any]:
        """A transposed convolution is a plain one over the input with zeros between its entries."""
        sizes = [(n - 1) * s + 1 for n, s in zip(data.shape[2:], self.strides, strict=True)]
        wide = np.full((*data.shape[:2], *sizes), zero, data.dtype)
        every: Any = (..., *[slice(None, None, s) for s in self.strides])
        wide[every] = data
        pads = [(0, 0), (0, 0)]
        for i, kernel in enumerate(self.kernel):
            edge = (kernel - 1) * self.dilations[i]
            pads.append((edge - self.begin[i], edge - self.end[i] + self.strides[i]))
        low = [(max(a, 0), max(b, 0)) for a, b in pads]
        return np.pad(wide, low, constant_values=zero)


def _flipped(array: NDArray[Any], axes: int) -> NDArray[Any]:
    return np.flip(array, tuple(range(array.ndim - axes, array.ndim)))


def quantized_layers(graph: ir.Graph, plan: QuantPlan) -> tuple[Layer, ...]:
    """The layers whose input, weight and bias are all in integers, in graph order."""
    read = (read_layer(node) for node in graph if runs_quantized(node, plan))
    return tuple(layer for layer in read if layer is not None and _in_integers(layer, plan))


def runs_quantized(node: ir.Node, plan: QuantPlan) -> bool:
    """Whether the plan quantizes the node."""
    verdict = plan.nodes.get(str(node.name))
    return verdict is not None and verdict.quantized


def _in_integers(layer: Layer, plan: QuantPlan) -> bool:
    names = [name for name in (layer.data, layer.weight, layer.bias) if name is not None]
    return all(map(plan.in_integers, names)) and plan.tensors[layer.weight].integer.symmetric


def read_layer(node: ir.Node) -> Layer | None:
    """The node as a layer, where its weight and bias are constants of its own and its attributes plain."""
    inputs = [*node.inputs, None, None, None][:3]
    data, weight, bias = inputs
    array = constant_array(weight)
    if data is None or weight is None or array is None or len(weight.uses()) != 1:
        return None
    if bias is not None and (constant_array(bias) is None or len(bias.uses()) != 1):
        return None
    names = (str(data.name), str(weight.name), None if bias is None else str(bias.name))
    common = (str(node.name), node.op_type, *names, str(node.outputs[0].name))
    if node.op_type == "MatMul":
        return Layer(*common) if array.ndim == 2 else None
    if node.op_type == "Gemm":
        plain = attribute_float(node, "alpha", 1.0) == attribute_float(node, "beta", 1.0) == 1.0
        if not plain or attribute_int(node, "transA", 0) or (bias is not None and not _vector(bias)):
            return None
        return Layer(*common, transposed=bool(attribute_int(node, "transB", 0)))
    if node.op_type not in _CONVS or _automatic_padding(node):
        return None
    return _convolution(node, Layer(*common), array)


def _automatic_padding(node: ir.Node) -> bool:
    attribute = node.attributes.get("auto_pad")
    return attribute is not None and attribute.as_string() != "NOTSET"


def _vector(value: ir.Value) -> bool:
    array = constant_array(value)
    return array is not None and array.ndim > 0 and array.size == array.shape[-1]


def _convolution(node: ir.Node, plain: Layer, array: NDArray[Any]) -> Layer | None:
    kernel = tuple(array.shape[2:])
    ones = (1,) * len(kernel)
    pads = attribute_ints(node, "pads") or (0,) * (2 * len(kernel))
    if node.op_type == "ConvTranspose" and ("output_shape" in node.attributes or min(pads) < 0):
        return None
    return replace(
        plain,
        groups=attribute_int(node, "group", 1),
        kernel=kernel,
        strides=attribute_ints(node, "strides") or ones,
        dilations=attribute_ints(node, "dilations") or ones,
        begin=pads[: len(kernel)],
        end=pads[len(kernel) :],
    )


_STORED = (np.dtype(np.float32), np.dtype(np.float64))


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """A layer that reads the last axis of its input.

    Attributes:
        node: MatMul, or Gemm with factors of 1.
        transposed: whether the stored weight is (outputs, inputs).
    """

    node: ir.Node
    transposed: bool

    @property
    def name(self) -> str:
        """What reports call it."""
        return str(self.node.name or self.node.outputs[0].name)

    @property
    def weight(self) -> NDArray[Any]:
        """(inputs, outputs), a view of what is stored now."""
        stored = constant_array(input_at(self.node, 1))
        assert stored is not None, "read_linear has seen it"
        return stored.T if self.transposed else stored

    @property
    def weight_name(self) -> str:
        """The initializer's name."""
        value = input_at(self.node, 1)
        return "" if value is None else str(value.name)

    def set_weight(self, editor: Editor, weight: NDArray[Any]) -> None:
        """Store another weight, (inputs, outputs), in the type of the old one."""
        stored = np.ascontiguousarray(weight.T if self.transposed else weight)
        editor.set_constant(self.node, 1, stored.astype(self.weight.dtype), "weight")

    def add_bias(self, editor: Editor, shift: NDArray[np.float64]) -> None:
        """Add a number to each output: in the bias where there is one, else in a new one."""
        slot = self._bias_slot()
        if slot is not None:
            node, index = slot
            old = constant_array(input_at(node, index))
            new = shift if old is None else old + shift
            editor.set_constant(node, index, new.astype(self.weight.dtype), "bias")
            return
        editor.insert_after(self.node.outputs[0], "Add", shift.astype(self.weight.dtype))

    def _bias_slot(self) -> tuple[ir.Node, int] | None:
        if self.node.op_type == "Gemm":
            return self.node, 2
        adding = only_reader(self.node.outputs[0])
        if adding is None or not is_op(adding, "Add"):
            return None
        for value, other in operands(adding):
            array = constant_array(other)
            if value is not self.node.outputs[0] or array is None or not same_rank(value, adding.outputs[0]):
                continue
            if array.size in (1, self.weight.shape[1]) and array.shape[-1:] in ((), (1,), (array.size,)):
                return adding, next(i for i, v in enumerate(adding.inputs) if v is other)
        return None


def read_linear(node: ir.Node) -> Linear | None:
    """The node as a layer, where its weight (and a Gemm's bias) are constants that can be rewritten."""
    if not is_op(node, "MatMul", "Gemm"):
        return None
    weight = constant_array(input_at(node, 1))
    if weight is None or weight.ndim != 2 or weight.dtype not in _STORED or not weight.size:
        return None
    if not np.isfinite(weight).all():
        return None
    if node.op_type == "MatMul":
        data = input_at(node, 0)
        deep = data is not None and data.shape is not None and len(data.shape) >= 2
        return Linear(node, transposed=False) if deep else None
    plain = attribute_float(node, "alpha", 1.0) == attribute_float(node, "beta", 1.0) == 1.0
    bias = input_at(node, 2)
    if not plain or attribute_int(node, "transA", 0) or (bias is not None and constant_array(bias) is None):
        return None
    return Linear(node, transposed=bool(attribute_int(node, "transB", 0)))
