"""A tensor cut into blocks along an axis, and put together again, for any rank and any length."""

from __future__ import annotations

import onnx_ir as ir

from roundel.qdq.functions.body import Body

BLOCK_AXIS = 2
"""Of the cut tensor: outer, blocks, values of a block (or sub-blocks), [values of a sub-block], inner."""


class Layout:
    """The cut of one tensor: its line is padded with zeros to whole blocks.

    Attributes:
        source: the tensor, in float32.
        single: whether it has one element; AMD's operators pass such a tensor on.
    """

    def __init__(self, body: Body, x: ir.Value, source: ir.Value) -> None:
        self.body, self.source, self._x = body, source, x
        op, one = body.op, body.integers([1])
        self.shape = op("Shape", x)
        rank = op("Shape", self.shape)
        axis = op("Reshape", body.attribute("axis"), one)
        axis = op("Where", op("Less", axis, body.integers([0])), op("Add", axis, rank), axis)
        axis = op("Where", op("Less", rank, body.integers([2])), body.integers([0]), axis)
        after = op("Add", axis, one)
        self.outer = self._product(op("Slice", self.shape, body.integers([0]), axis))
        self.length = self._product(op("Slice", self.shape, axis, after))
        self.inner = self._product(op("Slice", self.shape, after, rank))
        self.block = op("Reshape", body.attribute("block_size"), one)
        rest = op("Sub", op("Add", self.length, self.block), one)
        self.blocks = op("Div", rest, self.block)
        self.padded = op("Mul", self.blocks, self.block)
        self.single = op("Equal", op("Size", x), body.integers(1))

    def cut(self, value: ir.Value, sub_block: ir.Value | None = None) -> ir.Value:
        """(outer, blocks, block, inner), or with sub-blocks (outer, blocks, sub-blocks, sub-block, inner)."""
        body, op = self.body, self.body.op
        lines = self._reshape(value, self.outer, self.length, self.inner)
        missing = op("Sub", self.padded, self.length)
        pads = op("Concat", body.integers([0, 0, 0, 0]), missing, body.integers([0]), axis=0)
        whole = op("Pad", lines, pads, body.number(0.0))
        if sub_block is None:
            return self._reshape(whole, self.outer, self.blocks, self.block, self.inner)
        size = op("Reshape", sub_block, body.integers([1]))
        parts = op("Div", self.block, size)
        return self._reshape(whole, self.outer, self.blocks, parts, size, self.inner)

    def joined(self, value: ir.Value) -> ir.Value:
        """The tensor again, without its padding, in the type it came in."""
        body, op = self.body, self.body.op
        lines = self._reshape(value, self.outer, self.padded, self.inner)
        kept = op("Slice", lines, body.integers([0]), self.length, body.integers([1]))
        return op("CastLike", op("Reshape", kept, self.shape, allowzero=1), self._x)

    def _product(self, sizes: ir.Value) -> ir.Value:
        return self.body.op("ReduceProd", sizes, keepdims=1)

    def _reshape(self, value: ir.Value, *sizes: ir.Value) -> ir.Value:
        return self.body.op("Reshape", value, self.body.op("Concat", *sizes, axis=0), allowzero=1)
