"""The NPU divides by multiplying with k / 2**n; these are its errors as gains."""

from __future__ import annotations

import math

_SQUARE_POOLS = {3: (7, 6), 5: (10, 8), 6: (7, 8), 7: (21, 10), 14: (21, 12)}  # side: (k, n) of the hardware

HARD_SIGMOID_GAIN = 2731 * 6 / 16384


def reciprocal_gain(count: int) -> float:
    """count * k / 2**n for the k / 2**n next to 1 / count that the hardware finds first."""
    best_error, best = math.inf, 1.0
    for n in range(7 + math.ceil(math.log2(count)) if count > 1 else 1):
        k = round(2**n / count)
        error = abs(k / 2**n - 1 / count)
        if error < best_error:
            best_error, best = error, count * k / 2**n
    return best


def pool_gain(height: int, width: int) -> float:
    """The gain of an average pool with this kernel."""
    if max(height, width) > 255:
        return 1.0
    if height == width and height in _SQUARE_POOLS:
        k, n = _SQUARE_POOLS[height]
        return float(height * width * k / 2**n)
    return reciprocal_gain(height * width)
