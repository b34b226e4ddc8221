"""What equalization knows of one tensor: its channels and their bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.model.edit import Editor
from roundel.model.graph import constant_array, input_at, is_op, rank
from roundel.model.layers import Layer, read_layer, rewritable
from roundel.targets.operators import LAYERS
from roundel.types import Doubles

Ids = NDArray[np.intp]


class _Sets:
    """A union-find over whole numbers."""

    def __init__(self, count: int = 0) -> None:
        self.parent = list(range(count))

    def root(self, index: int) -> int:
        """The smallest number of its set."""
        parent = self.parent
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    def join(self, left: int, right: int) -> None:
        """Both are in one set."""
        a, b = self.root(left), self.root(right)
        self.parent[max(a, b)] = min(a, b)


class Channels:
    """The channels of every tensor that a layer makes, and what ties, fixes and limits their factors."""

    def __init__(self) -> None:
        self._tied = _Sets()
        self._blocks: list[int] = []  # the tensor of each channel
        self._fixed: list[Ids] = []
        self._caps: list[tuple[Ids, NDArray[np.float64]]] = []

    def fresh(self, count: int) -> Ids:
        """New channels, of one tensor, that nothing is tied to yet."""
        start = len(self._blocks)
        self._tied.parent.extend(range(start, start + count))
        self._blocks.extend([start] * count)
        return np.arange(start, start + count)

    def tie(self, left: Ids, right: Ids) -> None:
        """Channel by channel, both need the same factor."""
        for a, b in zip(left.tolist(), right.tolist(), strict=True):
            self._tied.join(a, b)

    def fix(self, ids: Ids) -> None:
        """These keep the factor 1."""
        self._fixed.append(ids)

    def cap(self, ids: Ids, most: NDArray[np.float64]) -> None:
        """These may not grow beyond a factor each; below 1 means that they may not change at all."""
        self._caps.append((ids, most))

    def settle(self) -> Settled:
        """Everything that was said, resolved."""
        count = len(self._blocks)
        roots = np.array([self._tied.root(i) for i in range(count)], np.intp)
        fixed = np.zeros(count, bool)
        for ids in self._fixed:
            fixed[roots[ids]] = True
        most = np.full(count, np.inf)
        for ids, limits in self._caps:
            np.minimum.at(most, roots[ids], limits)
        fixed |= most < 1
        return Settled(roots, fixed[roots], most[roots], self._spaces(roots))

    def _spaces(self, roots: Ids) -> Ids:
        """The number of the space of each channel: tensors with tied channels are one space."""
        spaces = _Sets(len(self._blocks))
        for index, root in enumerate(roots.tolist()):
            spaces.join(self._blocks[index], self._blocks[root])
        return np.array([spaces.root(block) for block in self._blocks], np.intp)


@dataclass(frozen=True, slots=True, eq=False)
class Settled:
    """For each channel: its representative, whether it is fixed, its largest factor, its space."""

    roots: Ids
    fixed: NDArray[np.bool_]
    most: NDArray[np.float64]
    spaces: Ids


_FAR = 1e60


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """What is known of one tensor.

    Attributes:
        axis: where its channels are.
        ids: its channels; None where it cannot be rescaled, and then low and high hold one number.
        low: each value of a channel is at least this.
        high: and at most this.
    """

    axis: int
    ids: Ids | None
    low: Doubles
    high: Doubles

    def within(self, low: Doubles | float, high: Doubles | float) -> Flow:
        """The same channels with other bounds."""
        shape = self.low.shape
        return replace(
            self,
            low=np.array(np.broadcast_to(low, shape), np.float64),
            high=np.array(np.broadcast_to(high, shape), np.float64),
        )

    def or_zero(self) -> Flow:
        """The same where some values may be zero instead."""
        return self.within(np.minimum(self.low, 0), np.maximum(self.high, 0))

    def sane(self) -> Flow:
        """Bounds too far out to compute with count as none."""
        low = np.where(np.abs(self.low) <= _FAR, self.low, -np.inf)
        return replace(self, low=low, high=np.where(np.abs(self.high) <= _FAR, self.high, np.inf))

    def hull(self) -> Flow:
        """The bounds alone, of all channels together."""
        return Flow(0, None, self.low.min(keepdims=True), self.high.max(keepdims=True))


def bounded(low: float, high: float) -> Flow:
    """A tensor of which only this much is known."""
    return Flow(0, None, np.array([low]), np.array([high]))


UNKNOWN = bounded(-np.inf, np.inf)


Bounds = tuple[Doubles, Doubles]


@dataclass(frozen=True, slots=True, eq=False)
class Rescaled:
    """A layer and what is to become of its constants.

    The stored weight stays as it is until `store`: rows and columns collect the factors.

    Attributes:
        layer: any but a normalization.
        weight: as blocks, a view of the stored weight.
        bias: (..., outputs); zeros where the node has none.
        rows: factor on each output channel.
        columns: factor on each input channel.
        data_axis: where the input has its channels.
        output_axis: where the output has them.
    """

    layer: Layer
    weight: NDArray[Any]
    bias: Doubles
    rows: Doubles
    columns: Doubles
    data_axis: int
    output_axis: int

    @property
    def takes_bias(self) -> bool:
        """Whether something can be added to every output channel."""
        return self.layer.op != "MatMul" and self.bias.ndim == 1 and self.layer.beta == 1.0

    @property
    def takes_constants(self) -> bool:
        """Whether a constant part of its inputs can move into its bias."""
        return self.takes_bias and not self.layer.padded

    def magnitudes(self) -> Doubles:
        """The largest absolute weight between each input and output, (groups, outputs, inputs)."""
        largest = _over_kernel(np.abs(self.weight), np.maximum)
        return np.asarray(largest * self._rows() * self._columns())

    def bounds(self, low: Doubles, high: Doubles) -> Bounds:
        """What the outputs can be at most and at least, for inputs between low and high."""
        if self.layer.padded:
            low, high = np.minimum(low, 0.0), np.maximum(high, 0.0)
        inputs = [self._scaled(side) for side in (low, high)]
        low, high = np.minimum(*inputs), np.maximum(*inputs)  # the gain may be negative
        positive = _over_kernel(np.maximum(self.weight, 0))
        negative = _over_kernel(np.minimum(self.weight, 0))
        below = (_times(positive, low) + _times(negative, high)).reshape(-1) * self.rows
        above = (_times(positive, high) + _times(negative, low)).reshape(-1) * self.rows
        flat = self.bias.reshape(-1, len(self.rows)) * self.layer.beta
        return below + flat.min(axis=0), above + flat.max(axis=0)

    def response(self, inputs: Doubles) -> Doubles:
        """What each output gains from these constant inputs; not for layers with padding."""
        summed = np.einsum("goi,gi->go", _over_kernel(self.weight), self._scaled(inputs))
        return np.asarray(summed.reshape(-1) * self.rows)

    def store(self, editor: Editor) -> bool:
        """Write weight and bias back, each only where it has changed; says whether one has."""
        old, node = self.layer.stored, self.layer.node
        changed = not (np.all(self.rows == 1) and np.all(self.columns == 1))
        if changed:
            scaled = self.weight * self._rows()[..., None] * self._columns()[..., None]
            new = self.layer.unblocked(scaled, old.shape)
            editor.set_constant(node, 1, new.astype(old.dtype), "weight")
        bias = constant_array(input_at(node, 2))
        given = np.zeros(1) if bias is None else bias.reshape(-1)
        if np.array_equal(np.broadcast_to(given, self.bias.size), self.bias.reshape(-1)):
            return changed
        editor.set_constant(node, 2, self.bias.astype(old.dtype), "bias")
        return True

    def _rows(self) -> Doubles:
        return self.rows.reshape(self.weight.shape[0], -1, 1)

    def _columns(self) -> Doubles:
        return self.columns.reshape(self.weight.shape[0], 1, -1)

    def _scaled(self, inputs: Doubles) -> Doubles:
        """Inputs as the stored weight meets them, (groups, inputs)."""
        scaled = np.broadcast_to(inputs, len(self.columns)) * self.columns * self.layer.alpha
        return np.nan_to_num(scaled, nan=0.0, posinf=np.inf, neginf=-np.inf).reshape(len(self.weight), -1)


def _over_kernel(weight: NDArray[Any], join: np.ufunc = np.add) -> Doubles:
    """The sum, or the largest, over the kernel. NumPy is slow where there is only one number to join."""
    if weight.shape[3] == 1:
        return weight[..., 0].astype(np.float64)
    return np.asarray(join.reduce(weight, axis=3, dtype=np.float64))


def _times(matrix: Doubles, inputs: Doubles) -> Doubles:
    """The product of each group, in which 0 * infinity is 0."""
    known = np.where(np.isfinite(inputs), inputs, 0.0)
    total = np.einsum("goi,gi->go", matrix, known)
    open_ended = np.isinf(inputs)
    if open_ended.any():
        signs = np.where(open_ended, np.sign(inputs), 0.0)
        pull = np.einsum("goi,gi->go", np.sign(matrix), signs)
        total = np.where(pull == 0, total, np.copysign(np.inf, pull))
    return np.asarray(total)


def rescalable(node: ir.Node) -> Rescaled | None:
    """The node as a layer without factors yet, where its weight and bias are constants that can take some."""
    layer = read_layer(node) if is_op(node, *LAYERS) else None
    if layer is None or not rewritable(layer.stored):
        return None
    weight = layer.blocks(layer.stored)
    groups, outputs, inputs = weight.shape[:3]
    bias = _bias(node, groups * outputs)
    axis = (rank(node.inputs[0]) or 0) - 1 if layer.op == "MatMul" else 1
    if bias is None or axis < 1:
        return None
    ones = np.ones(groups * outputs), np.ones(groups * inputs)
    return Rescaled(layer, weight, bias, *ones, 0 if layer.turned else axis, axis)


def _bias(node: ir.Node, outputs: int) -> Doubles | None:
    value = input_at(node, 2)
    if value is None:
        return np.zeros(outputs)
    bias = constant_array(value)
    if bias is None or not rewritable(bias) or bias.ndim > 2:
        return None
    if bias.size == 1:
        return np.full(outputs, float(bias.reshape(())))
    if bias.ndim == 0 or bias.shape[-1] != outputs:
        return None
    return np.array(bias.reshape(outputs) if bias.size == outputs else bias, np.float64)
