"""Float32 seen as bits, and rounding to a grid whose step is a power of two."""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import NDArray

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
