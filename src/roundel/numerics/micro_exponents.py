"""Micro-exponents (MX4, MX6, MX9): a shared exponent, and small sub-blocks that may lie a little below it.

A sub-block whose largest exponent is lower than the block's takes a finer step, by at most 2**d - 1 exponents
(d = shift bits). A block with a NaN or an infinity becomes NaN as a whole; subnormals become zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundel.numerics import float_bits as fb
from roundel.numerics.bfloat16 import round_bfloat16
from roundel.numerics.blocks import by_block
from roundel.numerics.float_bits import Floats, Ints, Rounding

NAN = np.int32(0x7FFFFFFF).view(np.float32)
"""The NaN that fills a block."""


@dataclass(frozen=True, slots=True)
class MicroExponents:
    """A micro-exponent format.

    Attributes:
        bit_width: 8 bits of shared exponent, a sign, and the rest for the multiple: 10 to 32 in all.
        block_size: neighbours that share an exponent.
        sub_block_size: neighbours that share a shift; divides the block size.
        sub_block_shift_bits: bits of a shift.
        rounding: of ties.
        bfloat16_first: round to bfloat16 before anything else.
    """

    bit_width: int = 13
    block_size: int = 16
    sub_block_size: int = 2
    sub_block_shift_bits: int = 1
    rounding: Rounding = Rounding.HALF_EVEN
    bfloat16_first: bool = False

    @property
    def digits(self) -> int:
        """Bits of a multiple, without its sign."""
        return self.bit_width - 9

    @property
    def reach(self) -> int:
        """Exponents that a sub-block may lie below its block."""
        return int(2**self.sub_block_shift_bits) - 1

    def apply(self, x: NDArray[Any], axis: int) -> Floats:
        """The values as the blocks along an axis hold them. One value alone stays as it is."""
        values = round_bfloat16(x) if self.bfloat16_first else np.asarray(x, np.float32)
        if values.size <= 1:
            return values.copy()
        return by_block(values, axis, self.block_size, self._block)

    def _block(self, values: Floats, spare: Ints) -> None:
        tops = self._tops(fb.magnitudes(values, spare))
        peaks = np.maximum.reduce(tops, axis=0)
        if self.digits > 22 or not fb.ordinary(peaks):
            values[...] = self._exact(values)
            return
        floor = fb.exponents(peaks) - np.int32(min(self.reach, 128) << fb.MANTISSA)
        tops = np.maximum(fb.exponents(tops), floor)
        magic = (tops + np.int32((24 - self.digits) << fb.MANTISSA | fb.HALF)).view(np.float32)
        tops |= np.int32(-1 << (24 - self.digits) & 0x7FFFFF)
        limit = tops.view(np.float32)
        signs = values.view(np.int32) & np.int32(-0x80000000)
        for row in range(0, len(values), self.sub_block_size):
            rows, sub = slice(row, row + self.sub_block_size), row // self.sub_block_size
            part = values[rows]
            np.minimum(part, limit[sub], out=part)
            np.maximum(part, -limit[sub], out=part)
            fb.snap(part, magic[sub], spare[rows], self.rounding)
        values.view(np.int32)[...] |= signs

    def _tops(self, bits: Ints) -> Ints:
        """The largest of each sub-block: (sub-blocks, lanes). The last one may be short."""
        size = self.sub_block_size
        if len(bits) % size == 0:
            return np.asarray(bits.reshape(-1, size, bits.shape[1]).max(1))
        return np.maximum.reduceat(bits, range(0, len(bits), size), axis=0)

    def _exact(self, values: Floats) -> Floats:
        """The definition, for all numbers that there are."""
        bits = values.view(np.int32) & fb.MAGNITUDE
        tops = fb.biased(self._tops(bits))
        shared = tops.max(0)
        level = np.maximum(tops, shared - np.int32(self.reach))
        level = np.repeat(level, self.sub_block_size, axis=0)[: len(values)]
        largest = np.float32(2.0**self.digits - 1)
        with np.errstate(all="ignore"):
            step = fb.power(level, 1 - self.digits)
            codes = np.clip(fb.nearest(values / step, self.rounding), -largest, largest)
            held = np.where(fb.biased(bits) == 0, np.float32(0), codes * step)
            return np.where(shared == 255, NAN, np.copysign(held, values))
