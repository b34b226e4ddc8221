"""What bfloat16 and float16 have in common: limits, rounding of constants, and the scale that suits them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundel.numerics import bfloat16, float16
from roundel.types import FloatType

# Bfloat16 is finest, in absolute terms, near zero; float16 is used to its full range.
_TARGETS = {FloatType.BFLOAT16: 2.0, FloatType.FLOAT16: float16.LARGEST}


def largest(ftype: FloatType) -> float:
    """The largest finite value."""
    return bfloat16.LARGEST if ftype is FloatType.BFLOAT16 else float16.LARGEST


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
        return bfloat16.to_bits(held(array, ftype))
    return float16.to_float16(held(array, ftype)).view(np.uint16)


def rounded(array: NDArray[Any], ftype: FloatType) -> NDArray[np.float32]:
    """Each value as the type holds it, in float32; what is finite stays finite."""
    if ftype is FloatType.BFLOAT16:
        return bfloat16.round_bfloat16(held(array, ftype))
    return float16.round_float16(held(array, ftype))


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A short float and the scale it is stored with: what QParams is to integers."""

    ftype: FloatType
    scale: float = 1.0

    def hold(self, array: NDArray[Any]) -> NDArray[np.float32]:
        """Each value as it is read back."""
        factor = np.float32(self.scale)
        return np.asarray(rounded(np.asarray(array, np.float32) / factor, self.ftype) * factor, np.float32)
