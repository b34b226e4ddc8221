"""bfloat16 by its bits: the upper half of a float32, rounded to nearest even.

The same numbers, bit for bit, as ONNX Runtime's Cast: infinities stay, values beyond the largest bfloat16
become infinite, and a NaN becomes the quiet NaN of its sign.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST = 3.3895313892515355e38
"""The largest finite bfloat16."""
SMALLEST_NORMAL = 1.1754943508222875e-38
"""The smallest bfloat16 with all its digits; the same as float32's."""

_INFINITY = np.uint32(0x7F800000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_QUIET_NAN = np.uint32(0x7FC00000)


def to_bits(x: NDArray[Any]) -> NDArray[np.uint16]:
    """The bfloat16 nearest to each value, as its 16 bits."""
    return np.asarray(_rounded_bits(x) >> np.uint32(16), np.uint16)


def from_bits(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The float32 of each bfloat16: exact."""
    return np.asarray(np.left_shift(bits, 16, dtype=np.uint32)).view(np.float32)


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
