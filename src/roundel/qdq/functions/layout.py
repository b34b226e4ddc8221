"""A tensor cut into blocks along an axis, and put together again, for any rank and any length."""

from __future__ import annotations

import onnx_ir as ir

from roundel.qdq.functions.body import Body


class Layout:
    """The cut of one tensor. Lines are padded with zeros to whole blocks.

    Blocks stand upright: places in the block first, then all blocks side by side. What holds for a block then
    broadcasts along long rows, which ONNX Runtime does many times faster than along short ones.

    Attributes:
        single: whether the tensor has one element; AMD's operators pass such a tensor on.
    """

    def __init__(self, body: Body, x: ir.Value) -> None:
        self._body, self._x = body, x
        op, one = body.op, body.integers([1])
        self._shape = op("Shape", x)
        rank = op("Shape", self._shape)
        axis = op("Reshape", body.attribute("axis"), one)
        axis = op("Where", op("Less", axis, body.integers([0])), op("Add", axis, rank), axis)
        axis = op("Where", op("Less", rank, body.integers([2])), body.integers([0]), axis)
        after = op("Add", axis, one)
        self._outer = self._product(op("Slice", self._shape, body.integers([0]), axis))
        self._length = self._product(op("Slice", self._shape, axis, after))
        self._inner = self._product(op("Slice", self._shape, after, rank))
        self._block = op("Reshape", body.attribute("block_size"), one)
        rest = op("Sub", op("Add", self._length, self._block), one)
        self._blocks = op("Div", rest, self._block)
        self._padded = op("Mul", self._blocks, self._block)
        self.single = op("Equal", op("Size", x), body.integers(1))

    def cut(self, value: ir.Value, sub_block: ir.Value | None = None) -> ir.Value:
        """(block, lanes), or with sub-blocks (sub-blocks, sub-block, lanes)."""
        body, op = self._body, self._body.op
        lines = self._reshape(value, self._outer, self._length, self._inner)
        missing = op("Sub", self._padded, self._length)
        pads = op("Concat", body.integers([0, 0, 0, 0]), missing, body.integers([0]), axis=0)
        whole = op("Pad", lines, pads, body.number(0.0))
        cut = self._reshape(whole, self._outer, self._blocks, self._block, self._inner)
        upright = op("Transpose", cut, perm=[2, 0, 1, 3])
        # The Reshape also keeps ONNX Runtime from moving the Transpose behind the arithmetic.
        if sub_block is None:
            return self._reshape(upright, self._block, self._lanes())
        size = op("Reshape", sub_block, body.integers([1]))
        return self._reshape(upright, op("Div", self._block, size), size, self._lanes())

    def joined(self, value: ir.Value) -> ir.Value:
        """The tensor again, without its padding, in the type it came in."""
        body, op = self._body, self._body.op
        upright = self._reshape(value, self._block, self._outer, self._blocks, self._inner)
        cut = op("Transpose", upright, perm=[1, 2, 0, 3])
        lines = self._reshape(cut, self._outer, self._padded, self._inner)
        kept = op("Slice", lines, body.integers([0]), self._length, body.integers([1]))
        return op("CastLike", op("Reshape", kept, self._shape, allowzero=1), self._x)

    def _lanes(self) -> ir.Value:
        op = self._body.op
        return op("Mul", op("Mul", self._outer, self._blocks), self._inner)

    def _product(self, sizes: ir.Value) -> ir.Value:
        return self._body.op("ReduceProd", sizes, keepdims=1)

    def _reshape(self, value: ir.Value, *sizes: ir.Value) -> ir.Value:
        return self._body.op("Reshape", value, self._body.op("Concat", *sizes, axis=0), allowzero=1)
