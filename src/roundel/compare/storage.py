"""How tensors are stored, in words for people."""

from __future__ import annotations

import re

import numpy as np

from roundel.check.stored import StoredTensor
from roundel.compare.types import Storage


def describe(stored: StoredTensor | None) -> Storage | None:
    """The range and step of a stored tensor; of its widest channel, where each channel has a scale."""
    if stored is None:
        return None
    codes = code_range(stored.dtype)
    if codes is None:
        return Storage(stored.dtype, -np.inf, np.inf, 0.0)
    scale, zero = stored.scale.reshape(-1), stored.zero_point.astype(np.float64).reshape(-1)
    widest = int(scale.argmax())
    shift = float(zero[widest if zero.size > 1 else 0])
    step = float(scale[widest])
    low, high = ((code - shift) * step for code in codes)
    return Storage(stored.dtype, low, high, step, int(scale.size), stored.axis)


def code_range(dtype: str) -> tuple[int, int] | None:
    """Smallest and largest code of an integer type by its name, None for any other type."""
    found = re.fullmatch(r"(u?)int(\d+)", dtype)
    if found is None:
        return None
    bits = int(found[2])
    return (0, 2**bits - 1) if found[1] else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
