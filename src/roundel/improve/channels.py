"""What equalization knows of one tensor: its channels and their bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.model.edit import Editor
from roundel.model.graph import (
    attribute_float,
    attribute_int,
    attribute_ints,
    attribute_string,
    constant_array,
    input_at,
    is_op,
)
from roundel.types import Doubles

Ids = NDArray[np.intp]


class Channels:
    """A union-find over the channels of every tensor that a layer makes."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._block: list[int] = []
        self._blocks = 0
        self._fixed: list[Ids] = []
        self._caps: list[tuple[Ids, NDArray[np.float64]]] = []

    def fresh(self, count: int) -> Ids:
        """New channels, of one tensor, that nothing is tied to yet."""
        start = len(self._parent)
        self._parent.extend(range(start, start + count))
        self._block.extend([self._blocks] * count)
        self._blocks += 1
        return np.arange(start, start + count)

    def tie(self, left: Ids, right: Ids) -> None:
        """Channel by channel, both need the same factor."""
        for a, b in zip(left.tolist(), right.tolist(), strict=True):
            a, b = self._root(a), self._root(b)
            if a != b:
                self._parent[max(a, b)] = min(a, b)

    def fix(self, ids: Ids) -> None:
        """These keep the factor 1."""
        self._fixed.append(ids)

    def cap(self, ids: Ids, most: NDArray[np.float64]) -> None:
        """These may not grow beyond a factor each; below 1 means that they may not change at all."""
        self._caps.append((ids, most))

    def settle(self) -> Settled:
        """Everything that was said, resolved."""
        count = len(self._parent)
        roots = np.array([self._root(i) for i in range(count)], np.intp)
        fixed = np.zeros(count, bool)
        for ids in self._fixed:
            fixed[roots[ids]] = True
        most = np.full(count, np.inf)
        for ids, limits in self._caps:
            np.minimum.at(most, roots[ids], limits)
        fixed |= most < 1
        return Settled(roots, fixed[roots], most[roots], self._spaces(roots))

    def _root(self, index: int) -> int:
        parent = self._parent
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    def _spaces(self, roots: Ids) -> Ids:
        """The number of the space of each channel: tensors with tied channels are one space."""
        label = list(range(self._blocks))

        def find(block: int) -> int:
            while label[block] != block:
                label[block] = label[label[block]]
                block = label[block]
            return block

        for index in np.flatnonzero(roots != np.arange(len(roots))).tolist():
            a, b = find(self._block[index]), find(self._block[int(roots[index])])
            label[max(a, b)] = min(a, b)
        return np.array([find(block) for block in self._block], np.intp)


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

_STORED = (np.dtype(np.float32), np.dtype(np.float64))


@dataclass(frozen=True, slots=True, eq=False)
class ChannelLayer:
    """A layer with constant weights, and what is to become of them.

    The stored weight stays as it is until `store`: rows and columns collect the factors.

    Attributes:
        node: Conv, ConvTranspose, Gemm or MatMul.
        weight: (groups, outputs per group, inputs per group, kernel), a view of the stored weight.
        bias: (..., outputs); zeros where the node has none.
        rows: factor on each output channel.
        columns: factor on each input channel.
        data_axis: where the input has its channels.
        output_axis: where the output has them.
        padded: whether zeros can take the place of an input.
        stated: beta of a Gemm, which its stored bias is multiplied by.
    """

    node: ir.Node
    weight: NDArray[Any]
    bias: Doubles
    rows: Doubles
    columns: Doubles
    data_axis: int
    output_axis: int
    padded: bool
    stated: float = 1.0

    @property
    def takes_bias(self) -> bool:
        """Whether something can be added to every output channel."""
        return self.node.op_type != "MatMul" and self.bias.ndim == 1 and self.stated == 1.0

    def magnitudes(self) -> Doubles:
        """The largest absolute weight between each input and output, (groups, outputs, inputs)."""
        largest = _over_kernel(np.abs(self.weight), np.maximum)
        return np.asarray(largest * self._rows() * self._columns())

    def bounds(self, low: Doubles, high: Doubles) -> Bounds:
        """What the outputs can be at most and at least, for inputs between low and high."""
        if self.padded:
            low, high = np.minimum(low, 0.0), np.maximum(high, 0.0)
        gain = attribute_float(self.node, "alpha", 1.0) if self.node.op_type == "Gemm" else 1.0
        size = len(self.columns)
        inputs = [self._grouped(np.broadcast_to(side, size) * self.columns * gain) for side in (low, high)]
        low, high = np.minimum(*inputs), np.maximum(*inputs)  # the gain may be negative
        positive = _over_kernel(np.maximum(self.weight, 0))
        negative = _over_kernel(np.minimum(self.weight, 0))
        below = (_times(positive, low) + _times(negative, high)).reshape(-1) * self.rows
        above = (_times(positive, high) + _times(negative, low)).reshape(-1) * self.rows
        flat = self.bias.reshape(-1, len(self.rows)) * self.stated
        return below + flat.min(axis=0), above + flat.max(axis=0)

    def response(self, inputs: Doubles) -> Doubles:
        """What each output gains from these constant inputs; not for layers with padding."""
        gain = attribute_float(self.node, "alpha", 1.0) if self.node.op_type == "Gemm" else 1.0
        scaled = self._grouped(inputs * self.columns * gain)
        return np.asarray(np.einsum("goi,gi->go", _over_kernel(self.weight), scaled).reshape(-1) * self.rows)

    def store(self, editor: Editor) -> bool:
        """Write weight and bias back, each only where it has changed; says whether one has."""
        old = constant_array(input_at(self.node, 1))
        assert old is not None
        changed = not (np.all(self.rows == 1) and np.all(self.columns == 1))
        if changed:
            scaled = self.weight * self._rows()[..., None] * self._columns()[..., None]
            editor.set_constant(self.node, 1, self._stored(scaled, old).astype(old.dtype), "weight")
        bias = constant_array(input_at(self.node, 2))
        given = np.zeros(1) if bias is None else bias.reshape(-1)
        if np.array_equal(np.broadcast_to(given, self.bias.size), self.bias.reshape(-1)):
            return changed
        editor.set_constant(self.node, 2, self.bias.astype(old.dtype), "bias")
        return True

    def _stored(self, canonical: NDArray[Any], old: NDArray[Any]) -> NDArray[Any]:
        if self.node.op_type == "Conv":
            return canonical.reshape(old.shape)
        if self.node.op_type == "ConvTranspose":
            return np.ascontiguousarray(canonical.transpose(0, 2, 1, 3)).reshape(old.shape)
        matrix = canonical[0, :, :, 0]
        turned = self.node.op_type == "Gemm" and attribute_int(self.node, "transB", 0)
        return matrix if turned else np.ascontiguousarray(matrix.T)

    def _rows(self) -> Doubles:
        return self.rows.reshape(self.weight.shape[0], -1, 1)

    def _columns(self) -> Doubles:
        return self.columns.reshape(self.weight.shape[0], 1, -1)

    def _grouped(self, inputs: Doubles) -> Doubles:
        return np.nan_to_num(inputs, nan=0.0, posinf=np.inf, neginf=-np.inf).reshape(len(self.weight), -1)


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


def channel_layer(node: ir.Node) -> ChannelLayer | None:
    """The node as a layer, where its weight and bias are constants that can be rescaled."""
    if not is_op(node, "Conv", "ConvTranspose", "Gemm", "MatMul") or len(node.inputs) < 2:
        return None
    weight = constant_array(input_at(node, 1))
    if weight is None or weight.dtype not in _STORED or not weight.size:
        return None
    canonical = _canonical(node, weight)
    if canonical is None or not np.isfinite(weight).all():
        return None
    outputs = canonical.shape[0] * canonical.shape[1]
    bias = _bias(node, outputs)
    axes = _axes(node)
    if bias is None or axes is None:
        return None
    return ChannelLayer(
        node=node,
        weight=canonical,
        bias=bias,
        rows=np.ones(outputs),
        columns=np.ones(canonical.shape[0] * canonical.shape[2]),
        data_axis=axes[0],
        output_axis=axes[1],
        padded=_padded(node),
        stated=attribute_float(node, "beta", 1.0) if node.op_type == "Gemm" else 1.0,
    )


def _canonical(node: ir.Node, weight: NDArray[Any]) -> NDArray[Any] | None:
    if node.op_type in ("Gemm", "MatMul"):
        if weight.ndim != 2:
            return None
        turned = node.op_type == "Gemm" and attribute_int(node, "transB", 0)
        return (weight if turned else weight.T)[None, :, :, None]
    groups = attribute_int(node, "group", 1)
    if weight.ndim < 3 or weight.shape[0] % groups:
        return None
    split = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
    return split if node.op_type == "Conv" else split.transpose(0, 2, 1, 3)


def _bias(node: ir.Node, outputs: int) -> Doubles | None:
    value = input_at(node, 2)
    if value is None:
        return np.zeros(outputs)
    bias = constant_array(value)
    if bias is None or bias.dtype not in _STORED or not np.isfinite(bias).all() or bias.ndim > 2:
        return None
    if bias.size == 1:
        return np.full(outputs, float(bias.reshape(())))
    if bias.ndim == 0 or bias.shape[-1] != outputs:
        return None
    return np.array(bias.reshape(outputs) if bias.size == outputs else bias, np.float64)


def _axes(node: ir.Node) -> tuple[int, int] | None:
    if node.op_type == "Gemm":
        return (0 if attribute_int(node, "transA", 0) else 1), 1
    if node.op_type != "MatMul":
        return 1, 1
    data = input_at(node, 0)
    if data is None or data.shape is None or len(data.shape) < 2:
        return None
    return len(data.shape) - 1, len(data.shape) - 1


def _padded(node: ir.Node) -> bool:
    if node.op_type == "Conv":
        automatic = attribute_string(node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID")
        return automatic or any(attribute_ints(node, "pads") or ())
    return node.op_type == "ConvTranspose"  # an output at the rim, or between strides, misses some inputs
