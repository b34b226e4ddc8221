"""A streaming histogram whose final counts do not depend on the order, split or first sample of the data.

The bin width is always a power of two and bin edges lie at integer multiples of it, so a wider range is
reached by adding neighbouring bins in pairs: exact, and the number of bins never grows. The width is a
function of the largest magnitude seen and of nothing else.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundel.types import Arrays, Range

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
            # frexp gives absmax < 2**reach strictly, so that the largest value always has a bin.
            self._widen(max(math.frexp(absmax)[1], _MIN_REACH) - HALF_BITS)
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

    def state(self) -> Arrays:
        """Plain arrays that `from_state` reads back; only the occupied stretch of bins is kept."""
        used = np.flatnonzero(self.counts)
        first, last = (int(used[0]), int(used[-1]) + 1) if used.size else (0, 0)
        return {
            "bins": self.counts[first:last].copy(),
            "first": np.array(first, np.int64),
            "exponent": np.array([] if self.exponent is None else [self.exponent], np.int64),
            "zeros": np.array(self.zeros, np.int64),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, NDArray[Any]]) -> Histogram:
        """The inverse of `state`.

        Raises:
            KeyError: an array is missing.
            ValueError: an array has another shape or type than `state` gives it.
        """
        bins, first, exponent = state["bins"], int(state["first"]), state["exponent"]
        if bins.ndim != 1 or bins.dtype.kind != "i" or first < 0 or first + bins.size > 2 * HALF:
            raise ValueError("the bins do not fit a histogram")
        histogram = cls()
        histogram.counts[first : first + bins.size] = bins
        histogram.exponent = int(exponent[0]) if exponent.size else None
        histogram.zeros = int(state["zeros"])
        return histogram

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


def _coarsen(counts: NDArray[np.int64], doublings: int) -> NDArray[np.int64]:
    if doublings == 0:
        return counts
    target = (np.arange(-HALF, HALF) >> min(doublings, 62)) + HALF
    merged = np.zeros_like(counts)
    np.add.at(merged, target, counts)
    return merged


Curve = tuple[NDArray[np.float64], NDArray[np.float64]]
_ENTROPY_WORK = 1 << 16  # candidates times codes: bounds the time of one search
# The bound that leaves a Gaussian 4 deviations when the deviation is measured on cube roots:
# 4**(1/3) / sqrt(E|z|**(2/3)).
_DEVIATIONS = 4.0
_CUBE_ROOT_FACTOR = 1.7722 / _DEVIATIONS ** (1 / 3)


class Scenario(enum.Enum):
    """On which scale the spread of a distribution is measured."""

    SAME = "same"
    P3 = "p3"


def percentile(bins: Bins, percent: float, *, symmetric: bool) -> Range:
    """The interval that keeps the given percentage of the values.

    Symmetric: the percentile t of |x| gives (-t, t). Otherwise half of the rest is cut on each side.
    Values are taken as spread evenly inside their bin.
    """
    if bins.absmax == 0.0:
        return Range(0.0, 0.0)
    fraction = percent / 100.0
    if symmetric:
        bound = _quantile(_magnitude_curve(bins), fraction)
        return _within(-bound, bound, bins)
    curve = _curve(bins)
    tail = (1.0 - fraction) / 2.0
    return _within(_quantile(curve, tail), _quantile(curve, 1.0 - tail), bins)


def entropy(bins: Bins, *, levels: int, symmetric: bool, resolution: int = 2048) -> Range:
    """The interval whose quantized distribution stays closest to the data's (Kullback-Leibler).

    Every candidate from `levels` bins up to the whole range is tried. Exact zeros are left out: any
    interval represents them exactly, and their spike would hide the rest.

    Args:
        bins: the histogram.
        levels: how many codes an unsigned magnitude (symmetric) or the whole interval gets.
        symmetric: cut |x| once; otherwise cut the upper end, then the lower end of what remains.
        resolution: upper bound on the bins of the search.
    """
    if bins.counts.size == 0:
        return Range(bins.low, bins.high)
    if symmetric:
        cells, width = _magnitude_cells(bins, resolution)
        bound = _best_length(cells, levels) * width
        return _within(-bound, bound, bins)
    cells, width, first = _signed_cells(bins, resolution)
    upper = _best_length(cells, levels)
    kept = cells[:upper].copy()
    kept[-1] += cells[upper:].sum()
    lower = upper - _best_length(kept[::-1], levels)
    return _within((first + lower) * width, (first + upper) * width, bins)


def distribution(bins: Bins, scenario: Scenario) -> Range:
    """Mean plus and minus four standard deviations.

    ONNX Runtime defines this method for 8-bit floats, where a scale follows from the deviation alone.
    For integers the interval must be finite: 4 deviations is near the least squared error for a Gaussian
    at 8 bits. Scenario P3 measures on cube roots, which long tails stretch less, with the factor chosen
    so that a Gaussian gets the same interval. A tensor with one sign only counts as half of a symmetric
    distribution around zero: its exact zeros are what an activation cut off and say nothing of the rest.
    """
    if bins.counts.size == 0:
        return Range(bins.low, bins.high)
    values = bins.centres if scenario is Scenario.SAME else np.cbrt(bins.centres)
    one_sided = bins.low >= 0.0 or bins.high <= 0.0
    total = float(bins.counts.sum()) if one_sided else bins.total
    mean = 0.0 if one_sided else float((bins.counts * values).sum() / total)
    power = float((bins.counts * values**2).sum() / total)
    spread = float(np.sqrt(max(power - mean**2, 0.0)))
    if scenario is Scenario.SAME:
        return _within(mean - _DEVIATIONS * spread, mean + _DEVIATIONS * spread, bins)
    bound = _CUBE_ROOT_FACTOR * float(np.cbrt(_DEVIATIONS)) * spread
    return _within((mean - bound) ** 3, (mean + bound) ** 3, bins)


def _within(low: float, high: float, bins: Bins) -> Range:
    return Range(min(max(low, bins.low), bins.high), max(min(high, bins.high), bins.low))


def _curve(bins: Bins) -> Curve:
    """Points of the cumulative count; a jump is two points at one place."""
    at = int(np.searchsorted(bins.left, 0.0))
    left, right = np.insert(bins.left, at, 0.0), np.insert(bins.right, at, 0.0)
    after = np.cumsum(np.insert(bins.counts, at, float(bins.zeros)))
    before = np.concatenate([[0.0], after[:-1]])
    return np.column_stack([left, right]).reshape(-1), np.column_stack([before, after]).reshape(-1)


def _magnitude_curve(bins: Bins) -> Curve:
    """Cumulative count of |x|: the two sides' curves added up."""
    negative = bins.left < 0.0
    sides = [
        (bins.left[~negative], bins.right[~negative], bins.counts[~negative]),
        (-bins.right[negative][::-1], -bins.left[negative][::-1], bins.counts[negative][::-1]),
    ]
    points = np.unique(np.concatenate([[0.0], *(edge for side in sides for edge in side[:2])]))
    total = np.full(points.size, float(bins.zeros))
    for left, right, counts in sides:
        if counts.size:
            after = np.cumsum(counts)
            heights = np.column_stack([after - counts, after]).reshape(-1)
            total += np.interp(points, np.column_stack([left, right]).reshape(-1), heights, left=0.0)
    return points, total


def _quantile(curve: Curve, fraction: float) -> float:
    """The smallest place where the cumulative count reaches the fraction."""
    points, heights = curve
    target = fraction * heights[-1]
    at = min(int(np.searchsorted(heights, target, side="left")), points.size - 1)
    if at == 0 or heights[at] == heights[at - 1]:
        return float(points[at])
    share = (target - heights[at - 1]) / (heights[at] - heights[at - 1])
    return float(points[at - 1] + min(share, 1.0) * (points[at] - points[at - 1]))


def _magnitude_cells(bins: Bins, resolution: int) -> tuple[NDArray[np.float64], float]:
    """Dense counts of |x| from zero to the largest magnitude."""
    width = _cell_width(bins.absmax, bins.width, resolution)
    cells = np.floor(np.where(bins.left < 0.0, -bins.centres, bins.centres) / width)
    return np.bincount(cells.astype(np.intp), weights=bins.counts).astype(np.float64), width


def _signed_cells(bins: Bins, resolution: int) -> tuple[NDArray[np.float64], float, int]:
    """Dense counts from the lowest to the highest value, and the number of the first cell."""
    width = _cell_width(bins.high - bins.low, bins.width, resolution)
    cells = np.floor(bins.centres / width).astype(np.intp)
    dense = np.bincount(cells - cells[0], weights=bins.counts).astype(np.float64)
    return dense, width, int(cells[0])


def _cell_width(extent: float, width: float, resolution: int) -> float:
    while extent > resolution * width:
        width *= 2
    return width


def _best_length(cells: NDArray[np.float64], levels: int) -> int:
    """How many leading cells to keep so that the divergence of their quantized version is least.

    Cells beyond the cut are added to the last kept cell of the reference, as saturation does. Sums over
    the groups that share a code come from cumulative sums, so a candidate costs one row of `levels`.
    """
    size = cells.size
    if size <= levels:
        return size
    tries = min(max(_ENTROPY_WORK // levels, 64), size - levels + 1)
    lengths = np.unique(np.linspace(levels, size, tries).astype(np.intp))
    mass = np.concatenate([[0.0], np.cumsum(cells)])
    used = np.concatenate([[0.0], np.cumsum(cells > 0)])
    own = np.concatenate([[0.0], np.cumsum(_xlogx(cells))])
    last, beyond = cells[lengths - 1], mass[-1] - mass[lengths]
    edges = lengths[:, None] * np.arange(levels + 1) // levels
    sums, filled = np.diff(mass[edges], axis=1), np.diff(used[edges], axis=1)
    filled[:, -1] += (last == 0) & (beyond > 0)
    # An empty group that receives the saturated rest has almost no density: a bad candidate, not an error.
    density = np.maximum(sums, 1e-9) / np.maximum(filled, 1.0)
    reference = own[lengths - 1] + _xlogx(last + beyond)
    modelled = (sums * np.log(density)).sum(axis=1) + beyond * np.log(density[:, -1])
    with np.errstate(divide="ignore"):
        divergence = (reference - modelled) / mass[-1] + np.log(mass[lengths] / mass[-1])
    divergence[mass[lengths] == 0.0] = np.inf
    return int(lengths[int(np.argmin(divergence))])


def _xlogx(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    return counts * np.log(np.maximum(counts, 1e-300))
