"""Float32 seen as bits, and rounding to a grid whose step is a power of two."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundel.types import FloatType

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]

MANTISSA = 23
MAGNITUDE = np.int32(0x7FFFFFFF)
EXPONENT = np.int32(0x7F800000)
HALF = np.int32(0x400000)  # the first bit of the mantissa: one and a half
BIAS = 127
SMALLEST_NORMAL = np.float32(2.0**-126)
LARGEST = np.finfo(np.float32).max

_ORDINARY_LOW = (BIAS - 96) << MANTISSA
_ORDINARY_HIGH = (BIAS + 96) << MANTISSA


class Rounding(enum.IntEnum):
    """Where a value goes that lies in the middle of two; the numbers are those of AMD's operators."""

    HALF_AWAY = 0
    HALF_UP = 1
    HALF_EVEN = 2


def magnitudes(values: Floats, out: Ints) -> Ints:
    """Bits of |x|: they order like the numbers themselves; NaN and infinity stand above all others."""
    return np.bitwise_and(values.view(np.int32), MAGNITUDE, out=out)


def ordinary(peaks: Ints) -> bool:
    """Whether all blocks are zero or of a size where neither overflow nor subnormals can occur.

    Args:
        peaks: bits of each block's largest magnitude.
    """
    smallest = int((peaks - np.int32(1)).view(np.uint32).min(initial=0xFFFFFFFF))  # zero becomes the largest
    return smallest >= _ORDINARY_LOW and int(peaks.max(initial=0)) < _ORDINARY_HIGH


def exponents(peaks: Ints) -> Ints:
    """Bits of the power of two at or below each ordinary peak; for a block of zeros, any will do."""
    return np.asarray(np.maximum(peaks & EXPONENT, np.int32(1 << MANTISSA)))


def power(fields: Ints, shift: int = 0) -> Floats:
    """2 ** (biased exponent - bias + shift); subnormal where it must be."""
    return np.asarray(np.ldexp(np.float32(1), fields - np.int32(BIAS - shift)), np.float32)


def biased(bits: Ints) -> Ints:
    """The exponent field: 0 for zero and subnormals, 255 for infinity and NaN."""
    return (bits & EXPONENT) >> np.int32(MANTISSA)


def nearest(ratio: Floats, rounding: Rounding) -> Floats:
    """Whole numbers. Half to even makes +0 of what lies between -1/2 and 0; the others keep zero's sign."""
    whole = np.rint(ratio)
    rest = ratio - whole
    if rounding is Rounding.HALF_EVEN:
        return np.asarray(ratio - rest)  # the same number, but -0 only for -0 itself
    if rounding is Rounding.HALF_UP:
        return np.where(rest == 0.5, whole + np.float32(1), whole)
    away = (np.abs(rest) == 0.5) & (rest * ratio > 0)
    return np.where(away, whole + rest + rest, whole)


def snap(values: Floats, magic: Floats, spare: Ints, rounding: Rounding) -> None:
    """Round in place to multiples of a step, given as 1.5 * 2**23 steps; |x| < 2**22 steps.

    Half to even leaves no -0; the others keep the sign of zero.
    """
    if rounding is Rounding.HALF_EVEN:
        values += magic
        values -= magic
        return
    signs = values.view(np.int32) & np.int32(-0x80000000)
    if rounding is Rounding.HALF_AWAY:
        np.abs(values, out=values)
    whole = np.add(values, magic, out=spare.view(np.float32))
    whole -= magic
    values -= whole  # the rest: exact
    step = magic * np.float32(2.0**-MANTISSA / 1.5)
    np.add(whole, step, out=whole, where=values == step * np.float32(0.5))
    np.abs(whole, out=whole)
    np.bitwise_or(whole.view(np.int32), signs, out=values.view(np.int32))


def vanishing_negatives(values: Floats, unit: Floats) -> NDArray[np.bool_] | None:
    """Where x / unit is -0, because x is or because x is so small; None where that is nowhere."""
    least = int(values.view(np.int32).min(initial=0))  # of the negatives, the one nearest to zero
    if least >= 0:
        return None
    nearest_zero = float(np.int32(least & int(MAGNITUDE)).view(np.float32))
    if nearest_zero > float(unit.max()) * 2.0**-150:
        return None
    with np.errstate(under="ignore"):
        return np.asarray((values / unit == 0) & np.signbit(values))


LARGEST_BFLOAT16 = 3.3895313892515355e38
"""The largest finite bfloat16."""
SMALLEST_BFLOAT16 = 1.1754943508222875e-38
"""The smallest bfloat16 with all its digits; the same as float32's."""

_INFINITY = np.uint32(0x7F800000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_QUIET_NAN = np.uint32(0x7FC00000)


def to_bits(x: NDArray[Any]) -> NDArray[np.uint16]:
    """The bfloat16 nearest to each value, as its 16 bits."""
    return np.asarray(_rounded_bits(x) >> np.uint32(16), np.uint16)


def round_bfloat16(x: NDArray[Any]) -> NDArray[np.float32]:
    """Each value rounded to bfloat16, as float32."""
    bits = _rounded_bits(x)
    bits &= np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def _rounded_bits(x: NDArray[Any]) -> NDArray[np.uint32]:
    """Float32 bits whose upper half is the rounded value."""
    # ascontiguousarray would give a number without dimensions one; asarray keeps it.
    source = np.asarray(x, np.float32, order="C").view(np.uint32)
    bits = np.asarray(source >> np.uint32(16))
    bits &= np.uint32(1)
    bits += np.uint32(0x7FFF)  # with the last kept bit added, a tie goes to the even neighbour
    bits += source
    invalid = (source & _MAGNITUDE) > _INFINITY
    if invalid.any():
        bits[invalid] = (source[invalid] & np.uint32(0x80000000)) | _QUIET_NAN
    return bits


LARGEST_FLOAT16 = 65504.0
"""The largest finite float16."""


def to_float16(x: NDArray[Any]) -> NDArray[np.float16]:
    """The float16 nearest to each value; infinity where Cast gives it."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.asarray(x, np.float32).astype(np.float16)


# Bfloat16 is finest, in absolute terms, near zero; float16 is used to its full range.
_TARGETS = {FloatType.BFLOAT16: 2.0, FloatType.FLOAT16: LARGEST_FLOAT16}


def largest(ftype: FloatType) -> float:
    """The largest finite value."""
    return LARGEST_BFLOAT16 if ftype is FloatType.BFLOAT16 else LARGEST_FLOAT16


def scale_to_range(magnitude: float, ftype: FloatType) -> NDArray[np.float32]:
    """The scale that brings a magnitude to the top of the type's target range; 1 where there is none."""
    scale = np.float32(magnitude / _TARGETS[ftype])
    usable = np.isfinite(scale) and scale >= np.finfo(np.float32).tiny
    return np.asarray(scale if usable else 1.0, np.float32)


def held(array: NDArray[Any], ftype: FloatType) -> NDArray[np.float32]:
    """The values with those that are finite, but beyond the type's range, at its ends."""
    top = np.float32(largest(ftype))
    work = np.asarray(array, np.float32)
    return np.where(np.isfinite(work), np.clip(work, -top, top), work)


def overflows(array: NDArray[Any], ftype: FloatType) -> bool:
    """Whether rounding would make something finite infinite."""
    work = np.asarray(array, np.float32)
    return bool((np.isfinite(work) & (np.abs(work) > largest(ftype))).any())


def bits(array: NDArray[Any], ftype: FloatType) -> NDArray[np.uint16]:
    """The 16 bits of each value, rounded to nearest even; what is finite stays finite."""
    if ftype is FloatType.BFLOAT16:
        return to_bits(held(array, ftype))
    return to_float16(held(array, ftype)).view(np.uint16)


def rounded(array: NDArray[Any], ftype: FloatType) -> NDArray[np.float32]:
    """Each value as the type holds it, in float32; what is finite stays finite."""
    if ftype is FloatType.BFLOAT16:
        return round_bfloat16(held(array, ftype))
    return to_float16(held(array, ftype)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A short float and the scale it is stored with: what QParams is to integers."""

    ftype: FloatType
    scale: float = 1.0

    def hold(self, array: NDArray[Any]) -> NDArray[np.float32]:
        """Each value as it is read back."""
        factor = np.float32(self.scale)
        return np.asarray(rounded(np.asarray(array, np.float32) / factor, self.ftype) * factor, np.float32)
