"""Block floating point (BFP16): neighbours share the exponent of the largest and hold multiples of a step.

A block of largest exponent E holds multiples of 2**(E + 1 - m), m = bits - 9, up to 2**(E + 1) less one step.
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

OVERFLOWING_CODE = 128
"""Of the compiler's variant, whatever the width."""


@dataclass(frozen=True, slots=True)
class BlockFloat:
    """A block floating point format.

    Attributes:
        bit_width: 8 bits of shared exponent, a sign, and the rest for the multiple: 10 to 32 in all.
        block_size: neighbours that share an exponent.
        rounding: of ties.
        compiler: give a block one exponent more where its largest value would round up to 128 steps, instead
            of holding it at the limit.
        bfloat16_first: round to bfloat16 before anything else.
    """

    bit_width: int = 16
    block_size: int = 8
    rounding: Rounding = Rounding.HALF_EVEN
    compiler: bool = False
    bfloat16_first: bool = False

    @property
    def digits(self) -> int:
        """Bits of a multiple, without its sign."""
        return self.bit_width - 9

    def apply(self, x: NDArray[Any], axis: int) -> Floats:
        """The values as the blocks along an axis hold them. NaN, infinity and one value alone stay."""
        values = round_bfloat16(x) if self.bfloat16_first else np.asarray(x, np.float32)
        if values.size <= 1:
            return values.copy()
        return by_block(values, axis, self.block_size, self._block)

    def _block(self, values: Floats, spare: Ints) -> None:
        peaks = np.maximum.reduce(fb.magnitudes(values, spare), axis=0)
        if self.compiler or self.digits > 22 or not fb.ordinary(peaks):
            values[...] = self._exact(values)
            return
        exponents = fb.exponents(peaks)
        magic = (exponents + np.int32((24 - self.digits) << fb.MANTISSA | fb.HALF)).view(np.float32)
        limit = (exponents | np.int32(-1 << (24 - self.digits) & 0x7FFFFF)).view(np.float32)
        step = magic * np.float32(2.0**-fb.MANTISSA / 1.5)
        zeros = fb.vanishing_negatives(values, step) if self.rounding is Rounding.HALF_EVEN else None
        np.minimum(values, limit, out=values)
        np.maximum(values, -limit, out=values)
        fb.snap(values, magic, spare, self.rounding)
        if zeros is not None:
            values[zeros] = -0.0

    def _exact(self, values: Floats) -> Floats:
        """The definition, for all numbers that there are."""
        bits = values.view(np.int32) & fb.MAGNITUDE
        finite = bits < fb.EXPONENT
        fields = fb.biased(np.where(finite, bits, 0))
        shared = fields.max(0)
        with np.errstate(all="ignore"):
            step, top = fb.power(shared, 1 - self.digits), 2.0**self.digits - 1
            low, high = -top, top
            if self.compiler:
                codes = fb.nearest(values / step, self.rounding)
                over = (codes >= OVERFLOWING_CODE) | (codes < -OVERFLOWING_CODE)
                raised = (over & (fields == shared) & finite).any(0)
                step = np.where(raised, step * np.float32(2), step)
                low, high = -(2.0 ** (2 * self.digits - 1)), 2.0 ** (self.digits - 1) * top  # hardly reached
            codes = np.clip(fb.nearest(values / step, self.rounding), low, high)
            return np.where(finite, codes * step, values)
