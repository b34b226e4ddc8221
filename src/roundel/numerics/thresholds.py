"""From a histogram to the interval worth keeping: percentile, entropy, distribution.

Every function is pure and returns an interval inside the observed extremes, so that a tensor without
negative values (after a ReLU) never spends codes on them.
"""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import NDArray

from roundel.numerics.histogram import Bins
from roundel.types import Range

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
