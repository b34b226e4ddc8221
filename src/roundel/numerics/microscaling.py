"""OCP microscaling (MXFP8, MXFP6, MXFP4, MXINT8): blocks of small floats or integers below a power of two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundel.numerics import float_bits as fb
from roundel.numerics.blocks import by_block
from roundel.numerics.float_bits import Floats, Ints, Rounding


@dataclass(frozen=True, slots=True)
class Element:
    """An element type.

    Attributes:
        exponent_bits: 0 for the integer, whose unit is 2**-6.
        mantissa_bits: explicit ones.
        top: exponent of the largest power of two that it holds.
        largest: the largest number.
    """

    exponent_bits: int
    mantissa_bits: int
    top: int
    largest: float

    @property
    def bottom(self) -> int:
        """Exponent of the smallest normal number."""
        return int(2 - 2 ** (self.exponent_bits - 1))


ELEMENTS = {
    "fp8_e5m2": Element(5, 2, 15, 57344.0),
    "fp8_e4m3": Element(4, 3, 8, 448.0),
    "fp6_e3m2": Element(3, 2, 4, 28.0),
    "fp6_e2m3": Element(2, 3, 2, 7.5),
    "fp4_e2m1": Element(2, 1, 2, 6.0),
    "int8": Element(0, 8, 0, 127.0),
}
"""By the names of AMD's operator."""
INTEGER_UNIT = 6
"""The integer element is a multiple of 2**-6."""
LOWEST_CODE = -128.0
"""Of the integer element."""


@dataclass(frozen=True, slots=True)
class Microscaling:
    """A microscaling format.

    Attributes:
        element_dtype: a key of ELEMENTS.
        block_size: neighbours that share a scale.
        rounding: of ties, for the integer; the floats always round half to even.
    """

    element_dtype: str = "int8"
    block_size: int = 32
    rounding: Rounding = Rounding.HALF_EVEN

    @property
    def element(self) -> Element:
        """The element type."""
        return ELEMENTS[self.element_dtype]

    def apply(self, x: NDArray[Any], axis: int) -> Floats:
        """The values as the blocks along an axis hold them. NaN, infinity and one value alone stay."""
        values = np.asarray(x, np.float32)
        if values.size <= 1:
            return values.copy()
        kernel = self._floats if self.element.exponent_bits else self._integers
        return by_block(values, axis, self.block_size, kernel)

    def _integers(self, values: Floats, spare: Ints) -> None:
        peaks = np.maximum.reduce(fb.magnitudes(values, spare), axis=0)
        if not fb.ordinary(peaks):
            values[...] = self._exact(values)
            return
        exponents = fb.exponents(peaks)
        unit = exponents.view(np.float32)
        magic = (exponents + np.int32((fb.MANTISSA - INTEGER_UNIT) << fb.MANTISSA | fb.HALF)).view(np.float32)
        zeros = fb.vanishing_negatives(values, unit) if self.rounding is Rounding.HALF_EVEN else None
        np.minimum(values, unit * np.float32(self.element.largest * 2.0**-INTEGER_UNIT), out=values)
        fb.snap(values, magic, spare, self.rounding)
        if zeros is not None:
            values[zeros] = -0.0

    def _floats(self, values: Floats, spare: Ints) -> None:
        bits = fb.magnitudes(values, spare)
        peaks = np.maximum.reduce(bits, axis=0)
        if not fb.ordinary(peaks):
            values[...] = self._exact(values)
            return
        element, exponents = self.element, fb.exponents(peaks)
        limit = np.ldexp(exponents.view(np.float32), -element.top) * np.float32(element.largest)
        floor = np.maximum(exponents - np.int32((element.top - element.bottom) << fb.MANTISSA), 0)
        np.maximum(bits, floor, out=bits)
        bits &= fb.EXPONENT
        bits += np.int32((fb.MANTISSA - element.mantissa_bits) << fb.MANTISSA | fb.HALF)
        np.minimum(values, limit, out=values)
        np.maximum(values, -limit, out=values)
        fb.snap(values, bits.view(np.float32), spare, Rounding.HALF_EVEN)

    def _exact(self, values: Floats) -> Floats:
        """The definition, for all numbers that there are."""
        bits = values.view(np.int32) & fb.MAGNITUDE
        finite = bits < fb.EXPONENT
        shared = fb.biased(np.where(finite, bits, 0)).max(0)
        element = self.element
        with np.errstate(all="ignore"):
            scale = fb.power(shared, -element.top)
            scaled = values / scale
            if element.exponent_bits == 0:
                codes = fb.nearest(scaled * np.float32(2.0**INTEGER_UNIT), self.rounding)
                held = np.clip(codes, LOWEST_CODE, element.largest) * np.float32(2.0**-INTEGER_UNIT)
            else:
                size = np.maximum(np.abs(scaled), np.float32(2.0**element.bottom))
                first = np.asarray(size.view(np.int32) & fb.EXPONENT).view(np.float32)
                magic = first * np.float32(1.5 * 2.0 ** (fb.MANTISSA - element.mantissa_bits))
                held = np.clip((scaled + magic) - magic, -element.largest, element.largest)
            return np.where(finite, scale * held, values)
