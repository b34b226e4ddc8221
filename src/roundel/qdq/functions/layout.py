"""A tensor cut into blocks along an axis, and put together again.

Blocks stand upright: places in the block first, then all blocks side by side. What holds for a block then
broadcasts along long rows, which ONNX Runtime does many times faster than along short ones. Lines that are no
multiple of the block are padded with zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from roundel.qdq.functions.body import Body


@dataclass(frozen=True, slots=True)
class Known:
    """Lines of known length, so that the body has no arithmetic on sizes: sessions load faster.

    Attributes:
        length: values along the axis.
        inner: product of the sizes behind the axis.
    """

    length: int
    inner: int

    def __str__(self) -> str:
        return f"{self.length}x{self.inner}"

    def cut(self, body: Body, x: ir.Value, size: int) -> ir.Value:
        """(block, lanes)."""
        blocks, padded = -(-self.length // size), self._padded(size)
        if padded != self.length:
            lines = body.reshape(x, [-1, self.length, self.inner])
            pads = body.integers([0, 0, 0, 0, padded - self.length, 0])
            x = body.op("Pad", lines, pads, body.number(0.0))
        cut = body.reshape(x, [-1, blocks, size, self.inner])
        # The Reshape behind it keeps ONNX Runtime from moving the Transpose behind the arithmetic.
        return body.reshape(body.op("Transpose", cut, perm=[2, 0, 1, 3]), [size, -1])

    def joined(self, body: Body, held: ir.Value, x: ir.Value, size: int) -> ir.Value:
        """The shape of x again."""
        blocks, padded = -(-self.length // size), self._padded(size)
        upright = body.reshape(held, [size, -1, blocks, self.inner])
        result = body.op("Transpose", upright, perm=[1, 2, 0, 3])
        if padded != self.length:
            lines = body.reshape(result, [-1, padded, self.inner])
            ends = [body.integers([number]) for number in (0, self.length, 1)]
            result = body.op("Slice", lines, *ends)
        return body.op("Reshape", result, body.op("Shape", x))

    def passed(self, body: Body, held: ir.Value, cut: ir.Value, x: ir.Value) -> ir.Value:
        """What is held: there is more than one element."""
        return held

    def _padded(self, size: int) -> int:
        return -(-self.length // size) * size


@dataclass(frozen=True, slots=True)
class Open:
    """Any rank, any sizes, all found at run time."""

    axis: int

    def __str__(self) -> str:
        return f"axis_{self.axis}".replace("-", "m")

    def cut(self, body: Body, x: ir.Value, size: int) -> ir.Value:
        """(block, lanes)."""
        op = body.op
        sizes = self._sizes(body, x, size)
        lines = self._reshape(body, x, sizes.outer, sizes.length, sizes.inner)
        missing = op("Sub", sizes.padded, sizes.length)
        pads = op("Concat", body.integers([0, 0, 0, 0]), missing, body.integers([0]), axis=0)
        whole = op("Pad", lines, pads, body.number(0.0))
        block = body.integers([size])
        cut = self._reshape(body, whole, sizes.outer, sizes.blocks, block, sizes.inner)
        upright = op("Transpose", cut, perm=[2, 0, 1, 3])
        return self._reshape(
            body, upright, block, op("Mul", op("Mul", sizes.outer, sizes.blocks), sizes.inner)
        )

    def joined(self, body: Body, held: ir.Value, x: ir.Value, size: int) -> ir.Value:
        """The shape of x again."""
        op = body.op
        sizes = self._sizes(body, x, size)
        upright = self._reshape(body, held, body.integers([size]), sizes.outer, sizes.blocks, sizes.inner)
        cut = op("Transpose", upright, perm=[1, 2, 0, 3])
        lines = self._reshape(body, cut, sizes.outer, sizes.padded, sizes.inner)
        kept = op("Slice", lines, body.integers([0]), sizes.length, body.integers([1]))
        return op("Reshape", kept, sizes.shape, allowzero=1)

    def passed(self, body: Body, held: ir.Value, cut: ir.Value, x: ir.Value) -> ir.Value:
        """What is held, or the tensor itself where it has one element. Gather, unlike Where, keeps a -0."""
        op, first = body.op, body.integers([0])
        both = op("Concat", op("Unsqueeze", held, first), op("Unsqueeze", cut, first), axis=0)
        single = op("Equal", op("Size", x), body.integers(1))
        return op("Gather", both, body.cast(single, ir.DataType.INT64), axis=0)

    def _sizes(self, body: Body, x: ir.Value, size: int) -> _Sizes:
        op, one = body.op, body.integers([1])
        shape = op("Shape", x)
        rank = op("Shape", shape)
        axis = body.integers([self.axis])
        if self.axis < 0:
            axis = op("Add", axis, rank)
        axis = op("Where", op("Less", rank, body.integers([2])), body.integers([0]), axis)
        after = op("Add", axis, one)
        outer, length, inner = (
            op("ReduceProd", op("Slice", shape, *ends), keepdims=1)
            for ends in ((body.integers([0]), axis), (axis, after), (after, rank))
        )
        block = body.integers([size])
        blocks = op("Div", op("Add", length, body.integers([size - 1])), block)
        return _Sizes(shape, outer, length, inner, blocks, op("Mul", blocks, block))

    def _reshape(self, body: Body, value: ir.Value, *sizes: ir.Value) -> ir.Value:
        return body.op("Reshape", value, body.op("Concat", *sizes, axis=0), allowzero=1)


@dataclass(frozen=True, slots=True, eq=False)
class _Sizes:
    """Of a tensor as outer x length x inner; vectors of one number each, but for the shape."""

    shape: ir.Value
    outer: ir.Value
    length: ir.Value
    inner: ir.Value
    blocks: ir.Value
    padded: ir.Value


def layout_of(value: ir.Value | None, axis: int) -> Known | Open | None:
    """How to cut a tensor; None for one element, which AMD's operators pass on."""
    shape = value.shape if value is not None else None
    if shape is None:
        return Open(axis)
    sizes = list(shape)
    if all(size == 1 for size in sizes):
        return None
    place = 0 if len(sizes) == 1 else axis % len(sizes)  # of a vector, whatever the axis says
    line = sizes[place:]
    if not all(isinstance(size, int) and size > 0 for size in line) or 0 in sizes:
        return Open(axis)
    numbers = [int(size) for size in line]  # type: ignore[arg-type]
    found = Known(numbers[0], math.prod(numbers[1:]))
    alone = found.length * found.inner == 1
    return Open(axis) if alone else found
