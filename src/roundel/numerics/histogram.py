"""A streaming histogram whose final counts do not depend on the order, split or first sample of the data.

The bin width is always a power of two and bin edges lie at integer multiples of it, so a wider range is
reached by adding neighbouring bins in pairs: exact, and the number of bins never grows. The width is a
function of the largest magnitude seen and of nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

HALF_BITS = 12
HALF = 1 << HALF_BITS
"""Bins on each side of zero: at least 2048 of them cover the largest magnitude."""

_MIN_REACH = -114  # keeps 2**-exponent a normal float32; anything below 5e-35 shares the bins next to zero
_CHUNK = 1 << 16  # the scratch arrays stay in the second-level cache
_BITS_OF_2_23 = np.float32(2**23).view(np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Bins:
    """What a threshold search reads: intervals that hold values, exact zeros apart, exact extremes.

    `left` and `right` are the edges in increasing order, cut to the observed extremes; `counts` are
    floats so that they enter sums directly. Exact zeros are never in `counts`: they cost no error.
    """

    left: NDArray[np.float64]
    right: NDArray[np.float64]
    counts: NDArray[np.float64]
    zeros: int
    width: float
    low: float
    high: float

    @property
    def total(self) -> float:
        """Number of values, zeros included."""
        return float(self.counts.sum()) + self.zeros

    @property
    def absmax(self) -> float:
        """Largest magnitude."""
        return max(abs(self.low), abs(self.high))

    @property
    def centres(self) -> NDArray[np.float64]:
        """Middle of each interval."""
        return (self.left + self.right) / 2

    def within(self, low: float, high: float) -> Bins:
        """Only the values in [low, high]; a bin that straddles an end stays when its middle is inside."""
        kept = (self.centres >= low) & (self.centres <= high)
        if not kept.any():
            return self
        left, right = np.maximum(self.left[kept], low), np.minimum(self.right[kept], high)
        ends = max(self.low, low), min(self.high, high)
        return Bins(left, right, self.counts[kept], self.zeros, self.width, *ends)

    def coarse(self, most: int) -> Bins:
        """The same counts in at most `most` bins, for searches that try many candidates."""
        doublings = max(0, math.ceil(math.log2(max(self.counts.size, 1) / most)))
        if doublings == 0:
            return self
        width = math.ldexp(self.width, doublings)
        cells, first = np.unique(np.floor(self.left / width), return_index=True)
        left, right = cells * width, (cells + 1) * width
        left[0], right[-1] = max(left[0], self.low), min(right[-1], self.high)
        counts = np.add.reduceat(self.counts, first)
        return Bins(left, right, counts, self.zeros, width, self.low, self.high)


class Histogram:
    """Exact counts of a stream of finite values in 2 * 4096 aligned bins, and of exact zeros beside them.

    Bin i covers [(i - 4096) * width, (i - 4096 + 1) * width) with width = 2**exponent.
    """

    __slots__ = ("counts", "exponent", "zeros")

    def __init__(self) -> None:
        self.exponent: int | None = None
        self.counts: NDArray[np.int64] = np.zeros(2 * HALF, np.int64)
        self.zeros = 0

    @property
    def width(self) -> float:
        """Width of a bin; 0 while nothing but zeros was seen."""
        return 0.0 if self.exponent is None else math.ldexp(1.0, self.exponent)

    def add(self, values: NDArray[np.float32] | NDArray[np.float64], absmax: float) -> None:
        """Count a flat array of finite values.

        Args:
            values: one-dimensional, contiguous.
            absmax: its largest magnitude, which the caller knows already.
        """
        if absmax:
            self._widen(_exponent_for(absmax))
        for start in range(0, values.size, _CHUNK):
            part = values[start : start + _CHUNK]
            zeros = int(np.count_nonzero(part == 0))
            self.zeros += zeros
            if self.exponent is not None and zeros < part.size:
                self.counts += np.bincount(_indices(part, self.exponent), minlength=2 * HALF)
                self.counts[HALF] -= zeros

    def merge(self, other: Histogram) -> None:
        """Add the counts of another histogram; the finer of the two is coarsened."""
        self.zeros += other.zeros
        if other.exponent is None:
            return
        self._widen(other.exponent)
        assert self.exponent is not None
        self.counts += _coarsen(other.counts, self.exponent - other.exponent)

    def bins(self, low: float, high: float) -> Bins:
        """The occupied intervals, cut to the observed extremes."""
        used = np.flatnonzero(self.counts)
        left = ((used - HALF) * self.width).astype(np.float64)
        right = left + self.width
        if used.size:
            left[0] = max(left[0], low)
            right[-1] = min(right[-1], high)
        return Bins(left, right, self.counts[used].astype(np.float64), self.zeros, self.width, low, high)

    def _widen(self, exponent: int) -> None:
        if self.exponent is None:
            self.exponent = exponent
        elif exponent > self.exponent:
            self.counts = _coarsen(self.counts, exponent - self.exponent)
            self.exponent = exponent


def bins_of(values: NDArray[Any]) -> Bins:
    """The bins of one array, for searches over constants."""
    flat = as_real(values)
    if flat.size == 0:
        return Histogram().bins(0.0, 0.0)
    low, high = float(flat.min()), float(flat.max())
    histogram = Histogram()
    histogram.add(flat, max(abs(low), abs(high)))
    return histogram.bins(low, high)


def as_real(values: NDArray[Any]) -> NDArray[np.float32] | NDArray[np.float64]:
    """A flat contiguous float32 or float64 array with the same values (no copy where it is one already)."""
    flat = np.ascontiguousarray(values).reshape(-1)
    wide = flat.dtype == np.float64 or (flat.dtype.kind in "iu" and flat.dtype.itemsize > 2)
    return flat.astype(np.float64, copy=False) if wide else flat.astype(np.float32, copy=False)


def _indices(values: NDArray[np.float32] | NDArray[np.float64], exponent: int) -> NDArray[Any]:
    """Bin numbers. Scaling by a power of two is exact unless it underflows; only then is float64 needed."""
    if values.dtype != np.float32 or exponent > 0:
        scaled = values * np.float64(math.ldexp(1.0, -exponent))
        np.floor(scaled, out=scaled)
        return (scaled + HALF).astype(np.int32)
    short = np.multiply(values, np.float32(math.ldexp(1.0, -exponent)), dtype=np.float32)
    np.floor(short, out=short)
    # Adding 2**23 leaves the whole number in the low bits of the float: cheaper than a cast.
    np.add(short, np.float32(2**23 + HALF), out=short)
    bits = short.view(np.int32)
    np.subtract(bits, _BITS_OF_2_23, out=bits)
    return bits


def _exponent_for(absmax: float) -> int:
    # frexp gives absmax < 2**reach strictly, so that the largest value always has a bin.
    _, reach = math.frexp(absmax)
    return max(reach, _MIN_REACH) - HALF_BITS


def _coarsen(counts: NDArray[np.int64], doublings: int) -> NDArray[np.int64]:
    if doublings == 0:
        return counts
    target = (np.arange(-HALF, HALF) >> min(doublings, 62)) + HALF
    merged = np.zeros_like(counts)
    np.add.at(merged, target, counts)
    return merged
