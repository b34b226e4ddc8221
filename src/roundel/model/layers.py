"""Layers: nodes that compute with constant weights, read once, and what may be done with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.model import graph
from roundel.model.edit import Editor
from roundel.targets.operators import LAYERS, Trait, ops_with
from roundel.types import Array, Doubles

NORMS = ("InstanceNormalization", "LayerNormalization")
_IMAGES = ops_with(Trait.CONV) | {"InstanceNormalization"}  # channels are their second axis
_STORED = (np.dtype(np.float32), np.dtype(np.float64))


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A node with constant weights.

    Its weight has two forms. As blocks it is (groups, outputs per group, inputs per group, kernel). As a
    matrix it is (groups, outputs per group, inputs per output): what the rows of `inputs` are multiplied by.
    A normalization is a layer, too: behind the statistics each channel is a group of its own.

    Attributes:
        node: of the graph that was read.
        name: what reports and plans call it.
        op: its operator.
        data, weight, bias, output: the tensors around it (the graph's names).
        groups: number of independent groups.
        kernel, strides, dilations, begin, end: of a convolution; empty for a matrix product.
        padding: auto_pad of a convolution; it has no other pads then.
        transposed, turned, alpha, beta: Gemm's transB, transA, and what it scales product and bias by.
        axis: first axis that a place of the output spans, where channels are not the second one.
    """

    node: ir.Node
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
    padding: str = "NOTSET"
    transposed: bool = False
    turned: bool = False
    alpha: float = 1.0
    beta: float = 1.0
    axis: int = -1

    @property
    def normalizes(self) -> bool:
        """Whether it multiplies normalized values, each channel by one number."""
        return self.op in NORMS

    @property
    def plain(self) -> bool:
        """Whether it is a product and a bias, with no more than stated padding."""
        return self.alpha == self.beta == 1.0 and not self.turned and self.padding == "NOTSET"

    @property
    def padded(self) -> bool:
        """Whether zeros can take the place of an input: at the rim, or between strides."""
        given = self.padding not in ("NOTSET", "VALID") or any((*self.begin, *self.end))
        return given or self.op == "ConvTranspose"

    def blocks(self, weight: Array) -> Array:
        """The weight tensor as blocks, a view where it can be."""
        if self.op in ("Gemm", "MatMul"):
            return (weight if self.transposed else weight.T)[None, :, :, None]
        inputs = 1 if self.normalizes else weight.shape[1]
        split = weight.reshape(self.groups, -1, inputs, math.prod(self.kernel))
        return split.transpose(0, 2, 1, 3) if self.op == "ConvTranspose" else split

    def unblocked(self, blocks: Array, shape: tuple[int, ...]) -> Array:
        """The inverse of `blocks`."""
        if self.op == "ConvTranspose":
            blocks = blocks.transpose(0, 2, 1, 3)
        elif self.op in ("Gemm", "MatMul") and not self.transposed:
            blocks = blocks[0, :, :, 0].T
        return np.ascontiguousarray(blocks).reshape(shape)

    def matrix(self, weight: Array) -> Array:
        """The weight tensor as (groups, outputs per group, inputs per output)."""
        blocks = self._turned(self.blocks(weight))
        return blocks.reshape(*blocks.shape[:2], -1)

    def tensor(self, matrix: Array, shape: tuple[int, ...]) -> Array:
        """The inverse of `matrix`."""
        blocks = matrix.reshape(*matrix.shape[:2], -1, math.prod(self.kernel))
        return self.unblocked(self._turned(blocks), shape)

    def _turned(self, blocks: Array) -> Array:
        """A transposed convolution meets its inputs in the opposite order."""
        return blocks[..., ::-1] if self.op == "ConvTranspose" else blocks

    def places(self, shape: tuple[int, ...], most: int, rng: np.random.Generator) -> NDArray[np.intp]:
        """Up to `most` flat positions of an output of this shape, for one sample; one in each equal part."""
        around = (shape[0], *shape[2:]) if self.op in _IMAGES else shape[: self.axis]
        count = math.prod(around)
        if count <= most:
            return np.arange(count)
        return ((np.arange(most) + rng.random(most)) * (count / most)).astype(np.intp)

    def targets(self, output: Array, places: NDArray[np.intp]) -> NDArray[np.float32]:
        """(n, groups, outputs per group) at the given places."""
        if self.op in _IMAGES:
            # Gather from the channels-first layout: turning the whole tensor around costs far more.
            batch, where = np.divmod(places, int(np.prod(output.shape[2:])))
            rows = output.reshape(*output.shape[:2], -1)[batch, :, where]
        else:
            rows = output.reshape(int(np.prod(output.shape[: self.axis])), -1)[places]
        return rows.reshape(len(places), self.groups, -1).astype(np.float32, copy=False)

    def inputs(self, data: Array, places: NDArray[np.intp], spatial: tuple[int, ...], zero: int = 0) -> Array:
        """(n, groups, inputs per output): what each place of the output is computed from.

        Args:
            data: the layer's input; real numbers for a normalization.
            places: flat positions of the output.
            spatial: height, width … of the output.
            zero: what means zero in the data, and so fills its padding.
        """
        if self.normalizes:
            spread = tuple(range(2 if self.op in _IMAGES else self.axis % data.ndim, data.ndim))
            epsilon = graph.attribute_float(self.node, "epsilon", 1e-5)
            deviation = np.sqrt(data.var(spread, keepdims=True) + epsilon)
            return self.targets((data - data.mean(spread, keepdims=True)) / deviation, places)
        if self.op not in _IMAGES:
            return data.reshape(-1, data.shape[-1])[places][:, None]
        given = self._stuffed(data, zero) if self.op == "ConvTranspose" else data
        batch, *where = np.unravel_index(places, (data.shape[0], *spatial))
        index, outside = self._reached(where, given.shape[2:])
        flat: Array = given.reshape(*given.shape[:2], -1)
        if len(flat) == 1:
            picked = flat[0].take(index.reshape(-1), axis=1).reshape(-1, *index.shape)
        else:
            picked = flat[batch[:, None], :, index].transpose(2, 0, 1)
        if outside.any():
            picked[:, outside] = zero
        rows: Array = picked.transpose(1, 0, 2).reshape(len(places), self.groups, -1)
        return rows

    def _reached(
        self, where: Sequence[NDArray[np.intp]], sizes: Sequence[int]
    ) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """(n, kernel): the flat positions that each place is computed from, and which of them are padding."""
        turned, count = self.op == "ConvTranspose", len(where[0])
        index, outside = np.zeros((count, 1), np.intp), np.zeros((count, 1), bool)
        for axis, (at, size) in enumerate(zip(where, sizes, strict=True)):
            dilation, stride = self.dilations[axis], 1 if turned else self.strides[axis]
            before = (self.kernel[axis] - 1) * dilation - self.begin[axis] if turned else self.begin[axis]
            line = (at * stride - before)[:, None] + np.arange(self.kernel[axis]) * dilation
            inside = np.clip(line, 0, size - 1)
            index = (index[:, :, None] * size + inside[:, None]).reshape(count, -1)
            outside = (outside[:, :, None] | (inside != line)[:, None]).reshape(count, -1)
        return index, outside

    def _stuffed(self, data: Array, zero: int) -> Array:
        """A transposed convolution is a plain one over the input with zeros between its entries."""
        sizes = [(n - 1) * s + 1 for n, s in zip(data.shape[2:], self.strides, strict=True)]
        wide = np.full((*data.shape[:2], *sizes), zero, data.dtype)
        every: Any = (..., *[slice(None, None, s) for s in self.strides])
        wide[every] = data
        return wide

    @property
    def stored(self) -> Array:
        """The weight tensor as it is now."""
        array = graph.constant_array(graph.input_at(self.node, 1))
        assert array is not None, "read_layer has seen it"
        return array

    @property
    def outputs(self) -> int:
        """How many output channels it has."""
        groups, outputs = self.blocks(self.stored).shape[:2]
        return int(groups * outputs)

    @property
    def operand(self) -> Array:
        """The weight of a layer without groups as (inputs, outputs): a product's right side, as it is now."""
        rows: Array = self.matrix(self.stored)[0]
        return rows.T

    def set_operand(self, editor: Editor, operand: Array) -> None:
        """Store another weight, (inputs, outputs), in the type of the old one."""
        old = self.stored
        new = self.tensor(operand.T[None], old.shape)
        editor.set_constant(self.node, 1, new.astype(old.dtype), "weight")

    def add_bias(self, editor: Editor, shift: Doubles) -> None:
        """Add a number to each output of a matrix product: in its bias if there is one, else in a new one."""
        slot, dtype = self._bias_slot(), self.stored.dtype
        if slot is None:
            editor.insert_after(self.node.outputs[0], "Add", shift.astype(dtype))
            return
        node, index = slot
        old = graph.constant_array(graph.input_at(node, index))
        new = shift if old is None else old + shift
        editor.set_constant(node, index, new.astype(dtype), "bias")

    def _bias_slot(self) -> tuple[ir.Node, int] | None:
        if self.op == "Gemm":
            return self.node, 2
        adding = graph.only_reader(self.node.outputs[0])
        if adding is None or not graph.is_op(adding, "Add"):
            return None
        for value, other in graph.operands(adding):
            array = graph.constant_array(other)
            if (
                value is not self.node.outputs[0]
                or array is None
                or not graph.same_rank(value, adding.outputs[0])
            ):
                continue
            if array.size in (1, self.operand.shape[1]) and array.shape[-1:] in ((), (1,), (array.size,)):
                return adding, next(i for i, v in enumerate(adding.inputs) if v is other)
        return None


def read_layer(node: ir.Node) -> Layer | None:
    """The node as a layer, where its weight is a constant; what may be done with it, others say."""
    data, weight, bias = (graph.input_at(node, index) for index in range(3))
    array = graph.constant_array(weight) if graph.is_op(node, *LAYERS, *NORMS) else None
    ndim = graph.rank(data)
    if data is None or weight is None or array is None or not array.size:
        return None
    names = (str(data.name), str(weight.name), None if bias is None else str(bias.name))
    common = (node, str(node.name or node.outputs[0].name), node.op_type, *names, str(node.outputs[0].name))
    if node.op_type in NORMS:
        axis = graph.attribute_int(node, "axis", -1)
        return Layer(*common, groups=array.size, axis=axis % ndim) if ndim else None
    groups = graph.attribute_int(node, "group", 1)
    flat = node.op_type in ("Gemm", "MatMul")
    if (array.ndim != 2 if flat else array.ndim < 3) or array.shape[0] % groups:
        return None
    kernel = tuple(array.shape[2:])
    ones = (1,) * len(kernel)
    pads = graph.attribute_ints(node, "pads") or (0,) * (2 * len(kernel))
    return Layer(
        *common,
        groups=groups,
        kernel=kernel,
        strides=graph.attribute_ints(node, "strides") or ones,
        dilations=graph.attribute_ints(node, "dilations") or ones,
        begin=pads[: len(kernel)],
        end=pads[len(kernel) :],
        padding=graph.attribute_string(node, "auto_pad", "NOTSET"),
        transposed=bool(graph.attribute_int(node, "transB", 0)),
        turned=bool(graph.attribute_int(node, "transA", 0)),
        alpha=graph.attribute_float(node, "alpha", 1.0),
        beta=graph.attribute_float(node, "beta", 1.0),
    )


def read_linear(node: ir.Node) -> Layer | None:
    """A plain product of the last axis with a matrix, where its weight and bias can be rewritten."""
    layer = read_layer(node) if graph.is_op(node, "Gemm", "MatMul") else None
    if layer is None or not layer.plain or not rewritable(layer.stored):
        return None
    if layer.bias is not None and graph.constant_array(node.inputs[2]) is None:
        return None
    return layer if layer.op == "Gemm" or (graph.rank(node.inputs[0]) or 0) >= 2 else None


def read_own(node: ir.Node) -> Layer | None:
    """The node as a layer whose constants no other node reads, and whose outputs `inputs` accounts for."""
    layer = read_layer(node)
    if layer is None or not layer.plain:
        return None
    for value in node.inputs[1:3]:
        if value is not None and (graph.constant_array(value) is None or len(value.uses()) != 1):
            return None
    bias = graph.constant_array(graph.input_at(node, 2))
    if layer.op == "Gemm" and bias is not None and bias.shape[-1:] != (bias.size,):
        return None
    sized = "output_shape" in node.attributes or min((*layer.begin, *layer.end), default=0) < 0
    return None if layer.op == "ConvTranspose" and sized else layer


def rewritable(array: Array) -> bool:
    """Whether a constant can take factors."""
    return array.dtype in _STORED and bool(np.isfinite(array).all())
