"""Searches for the scale with the least quantization error, over a histogram.

The error of a candidate is integrated exactly for values spread evenly inside each bin, so it holds for
bins wider than a quantization step (16-bit types) as well as for much finer ones.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from roundel.numerics.affine import params_from_range, weight_params
from roundel.numerics.histogram import Bins, bins_of
from roundel.types import PerChannel, PerTensor, QParams, QType, Range, Scheme

ReaderFunction = Callable[
    [NDArray[np.float64]], NDArray[np.float64]
]  # what is seen of values, and so of errors

_Number = TypeVar("_Number", int, NDArray[np.int64])

_SEARCH_BINS = 1024
_MIN_EXPONENT = -126
_EXPONENTS_BELOW = 11  # a range cut to 1/2048 of the largest magnitude is the last one tried
_GRID = np.exp2(-np.arange(0, 8.01, 0.25))  # shrink factors 1 … 1/256
_STEP = 2.0**-0.25


class ErrorMetric(enum.Enum):
    """How the error of a value counts."""

    MAE = "mae"
    MSE = "mse"


def quantization_error(
    bins: Bins,
    params: QParams,
    metric: ErrorMetric = ErrorMetric.MSE,
    *,
    narrow: bool = False,
    reader: ReaderFunction | None = None,
) -> NDArray[np.float64]:
    """Sum over all values of |x - dequantize(quantize(x))| or of its square. Zeros cost nothing.

    Args:
        bins: the values.
        params: a scale and zero point, or several candidates; there is one result for each.
        metric: absolute or squared error.
        narrow: leave out the lowest code of a signed type, as weights do.
        reader: a function that the values go through; its errors count instead.
    """
    scale = params.scale.astype(np.float64)[..., None]
    low, high = _codes(params.qtype, params.zero_point.astype(np.int64)[..., None], narrow)
    left, right = bins.left / scale, bins.right / scale
    width = right - left
    point = width <= 0.0
    integral = _integral(right, low, high, metric) - _integral(left, low, high, metric)
    if point.any():
        width = np.where(point, 1.0, width)
        error = np.where(point, _point_error(left, low, high, metric), integral / width)
    else:
        error = integral / width
    power = 1 if metric is ErrorMetric.MAE else 2
    if reader is not None:
        error = _errors_behind(reader, bins.centres / scale, scale, error, (low, high), power)
    return np.asarray((bins.counts * error).sum(-1) * scale[..., 0] ** power)


def best_range(
    bins: Bins,
    candidates: Sequence[Range],
    scheme: Scheme,
    metric: ErrorMetric,
    reader: ReaderFunction | None = None,
) -> Range:
    """The candidate with the least error; the first of equals."""
    each = replace(scheme, granularity=PerChannel(0))
    params = params_from_range([c.low for c in candidates], [c.high for c in candidates], each)
    return candidates[_least(quantization_error(bins, params, metric, reader=reader))]


def _least(errors: NDArray[np.float64]) -> int:
    return int(np.where(np.isnan(errors), np.inf, errors).argmin())


def least_squares_range(bins: Bins, scheme: Scheme, reader: ReaderFunction | None = None) -> Range:
    """The interval whose scale has the least squared error; the observed extremes are always a candidate.

    A coarse grid shrinks both ends together; then each end that matters is refined on its own.
    """
    scheme = Scheme(scheme.qtype, scheme.symmetric, scheme.scale, PerTensor(), scheme.reduce_range)
    bins = bins.coarse(_SEARCH_BINS)
    whole = Range(min(bins.low, 0.0), max(bins.high, 0.0))
    if whole.absmax == 0.0:
        return whole
    if scheme.symmetric:
        whole = Range(-whole.absmax, whole.absmax)
    best = best_range(bins, [_shrunk(whole, f, f) for f in _GRID], scheme, ErrorMetric.MSE, reader)
    for reach in (1.0, 0.3):
        factors = [_STEP ** (reach * k / 3) for k in (0, -3, -2, -1, 1, 2, 3)]
        both = [(f, f) for f in factors]
        sides = [(f, 1.0) for f in factors[1:]] + [(1.0, f) for f in factors[1:]]
        moves: Sequence[tuple[float, float]] = both if scheme.symmetric else both + sides
        near = [_clipped(_shrunk(best, a, b), whole) for a, b in moves]
        best = best_range(bins, near, scheme, ErrorMetric.MSE, reader)
    return best


def power_of_two_least_squares(
    bins: Bins, scheme: Scheme, *, narrow: bool = False, reader: ReaderFunction | None = None
) -> QParams:
    """The power-of-two scale with the least squared error; the larger scale of equals.

    Candidates run from twice the scale that clips nothing down to 2**-11 of it. Asymmetric schemes also
    choose between zero points that keep the lower end, the upper end, or the middle of the range.
    """
    if bins.absmax == 0.0:
        return _params(0, _zero_points(0.0, 0.0, 1.0, scheme, narrow)[0], scheme)
    top = non_overflow_exponent(bins.low, bins.high, scheme, narrow=narrow)
    first, last = min(top + 1, largest_exponent(scheme.qtype)), max(top - _EXPONENTS_BELOW, _MIN_EXPONENT)
    tried = [
        (exponent, zero)
        for exponent in range(first, last - 1, -1)
        for zero in _zero_points(bins.low, bins.high, math.ldexp(1.0, exponent), scheme, narrow)
    ]
    exponents, zeros = (np.array(side) for side in zip(*tried, strict=True))
    scales = np.ldexp(1.0, exponents).astype(np.float32)
    params = QParams(scales, zeros.astype(scheme.qtype.dtype), scheme.qtype, 0)
    return _params(*tried[_least(quantization_error(bins, params, narrow=narrow, reader=reader))], scheme)


def power_of_two_params(exponent: int, scheme: Scheme) -> QParams:
    """Scale 2**exponent with the zero point of a symmetric scheme."""
    return _params(exponent, _zero_points(0.0, 0.0, 1.0, scheme, narrow=False)[0], scheme)


def largest_exponent(qtype: QType) -> int:
    """Of the largest power-of-two scale at which every code stands for a finite float32."""
    return 128 - qtype.bits


def non_overflow(low: float, high: float, scheme: Scheme, *, narrow: bool = False) -> QParams:
    """The smallest power-of-two scale at which no value in [low, high] saturates."""
    exponent = non_overflow_exponent(low, high, scheme, narrow=narrow)
    return _params(exponent, _zero_points(low, high, math.ldexp(1.0, exponent), scheme, narrow)[0], scheme)


def non_overflow_exponent(low: float, high: float, scheme: Scheme, *, narrow: bool = False) -> int:
    """The exponent of that scale; 0 for an empty range."""
    low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        return 0
    codes = scheme.qtype.qmax - scheme.qtype.qmin
    # Rounding the logarithm down starts at or below the answer; the loop then decides exactly.
    most = largest_exponent(scheme.qtype)
    exponent = min(max(math.frexp((high - low) / codes)[1] - 2, _MIN_EXPONENT), most)
    while exponent < most and not _covers(low, high, exponent, scheme, narrow):
        exponent += 1
    return exponent


def _covers(low: float, high: float, exponent: int, scheme: Scheme, narrow: bool) -> bool:
    scale = math.ldexp(1.0, exponent)
    zero = _zero_points(low, high, scale, scheme, narrow)[0]
    first, last = _codes(scheme.qtype, zero, narrow)
    return first * scale <= low and high <= last * scale


def _zero_points(low: float, high: float, scale: float, scheme: Scheme, narrow: bool) -> list[int]:
    """Zero points worth a try: the lower end kept, the upper end kept, the middle of range and of codes."""
    first, last = _codes(scheme.qtype, 0, narrow)
    middle = 0 if scheme.qtype.signed else (last + 1) // 2
    if scheme.symmetric:
        return [middle]
    # The quotients stay apart from the codes: added first, a tiny end would vanish and be clipped.
    lower = first + math.ceil(-min(low, 0.0) / scale)
    upper = last - math.ceil(max(high, 0.0) / scale)
    wanted = (lower, upper, (lower + upper) // 2, middle)
    return list(dict.fromkeys(min(max(z, first), last) for z in wanted))


def _params(exponent: int, zero: int, scheme: Scheme) -> QParams:
    scale = np.asarray(math.ldexp(1.0, exponent), np.float32)
    return QParams(scale, np.asarray(zero, scheme.qtype.dtype), scheme.qtype)


def _codes(qtype: QType, zero: _Number, narrow: bool) -> tuple[_Number, _Number]:
    lowest = qtype.qmin + (1 if narrow and qtype.signed else 0)
    return lowest - zero, qtype.qmax - zero


def _integral(x: NDArray[np.float64], low: Any, high: Any, metric: ErrorMetric) -> NDArray[np.float64]:
    """Integral of the error from 0 to x, in units of the scale: whole steps, the rest, what is clipped."""
    inside = np.minimum(np.maximum(x, low), high)
    code = np.rint(inside)
    rest, over = inside - code, x - inside
    if metric is ErrorMetric.MAE:
        return np.asarray(code / 4 + (rest * np.abs(rest) + over * np.abs(over)) / 2)
    return np.asarray(code / 12 + (rest * rest * rest + over * over * over) / 3)


def _point_error(x: NDArray[np.float64], low: Any, high: Any, metric: ErrorMetric) -> NDArray[np.float64]:
    off = np.abs(x - np.minimum(np.maximum(np.rint(x), low), high))
    return np.asarray(off if metric is ErrorMetric.MAE else off * off)


def _errors_behind(
    reader: ReaderFunction,
    x: NDArray[np.float64],
    scale: NDArray[np.float64],
    error: NDArray[np.float64],
    codes: tuple[Any, Any],
    power: int,
) -> NDArray[np.float64]:
    """Errors behind a function, in units of the scale: by its slope over a step; what clipping moves."""
    slope = reader((x + 0.5) * scale) - reader((x - 0.5) * scale)
    end = np.clip(x, *codes)
    moved = reader(end * scale) - reader(x * scale)
    return np.asarray(
        np.where(x == end, error * np.abs(slope / scale) ** power, np.abs(moved / scale) ** power)
    )


def _shrunk(whole: Range, low: float, high: float) -> Range:
    return Range(whole.low * float(low), whole.high * float(high))


def _clipped(candidate: Range, whole: Range) -> Range:
    return Range(max(candidate.low, whole.low), min(candidate.high, whole.high))


_WEIGHT_GRID = np.geomspace(1.0, 0.1, 16)
_RATIO = float(_WEIGHT_GRID[1] / _WEIGHT_GRID[0])
_HISTOGRAM_SIZE = 1 << 16  # above it a histogram of the whole tensor is as good and much faster
_EXPONENTS = range(1, -8, -1)
_BLOCK = 1 << 18  # values at a time: the scratch arrays stay in the cache


def weight_least_squares(array: NDArray[Any], scheme: Scheme) -> QParams:
    """The float scale (one per channel where the scheme says so) with the least squared error."""
    rows = _rows(array, scheme)
    if rows.size == 0:
        return weight_params(array, scheme)
    if isinstance(scheme.granularity, PerTensor) and rows.size > _HISTOGRAM_SIZE:
        found = least_squares_range(bins_of(rows), scheme)
        return params_from_range(found.low, found.high, scheme)
    low, high = rows.min(1).astype(np.float64), rows.max(1).astype(np.float64)
    row_scheme = replace(scheme, granularity=PerChannel(0))
    factor, error = np.ones(len(rows)), np.full(len(rows), np.inf)
    rounds = [
        _WEIGHT_GRID,
        *(_RATIO ** (np.array([-3, -2, -1, 1, 2, 3]) * reach / 4) for reach in (1.0, 0.25)),
    ]
    for moves in rounds:
        base = factor.copy()
        for move in moves:
            tried = np.minimum(base * move, 1.0)
            params = params_from_range(low * tried, high * tried, row_scheme)
            new = _row_errors(rows, params, scheme)
            better = new < error
            factor, error = np.where(better, tried, factor), np.where(better, new, error)
    return _shaped(params_from_range(low * factor, high * factor, row_scheme), scheme)


def weight_power_of_two(array: NDArray[Any], scheme: Scheme, *, clip: bool) -> QParams:
    """A power-of-two scale: the least squared error, or (without `clip`) the smallest that holds all."""
    rows = _rows(array, scheme)
    narrow = scheme.symmetric
    row_scheme = replace(scheme, granularity=PerTensor())
    if not clip or not scheme.symmetric or (len(rows) == 1 and rows.size > _HISTOGRAM_SIZE):
        found = [_one_power_of_two(row, row_scheme, clip=clip) for row in rows]
        scale = np.array([p.scale for p in found], np.float32)
        zero = np.array([p.zero_point for p in found], scheme.qtype.dtype)
        return _shaped(QParams(scale, zero, scheme.qtype, 0), scheme)
    ends = zip(rows.min(1, initial=0).tolist(), rows.max(1, initial=0).tolist(), strict=True)
    top = np.array([non_overflow_exponent(low, high, scheme, narrow=narrow) for low, high in ends])
    middle = 0 if scheme.qtype.signed else (scheme.qtype.qmax + 1) // 2
    zero = np.full(len(rows), middle, scheme.qtype.dtype)
    best, error = top, np.full(len(rows), np.inf)
    for step in _EXPONENTS:
        exponent = np.clip(top + step, -126, largest_exponent(scheme.qtype))
        params = QParams(np.exp2(exponent).astype(np.float32), zero, scheme.qtype, 0)
        new = _row_errors(rows, params, scheme)
        better = new < error
        best, error = np.where(better, exponent, best), np.where(better, new, error)
    best = np.where(np.any(rows != 0, axis=1), best, 0)
    return _shaped(QParams(np.exp2(best).astype(np.float32), zero, scheme.qtype, 0), scheme)


def _one_power_of_two(row: NDArray[np.float32], scheme: Scheme, *, clip: bool) -> QParams:
    if clip:
        return power_of_two_least_squares(bins_of(row), scheme, narrow=scheme.symmetric)
    low, high = float(row.min(initial=0)), float(row.max(initial=0))
    return non_overflow(low, high, scheme, narrow=scheme.symmetric)


def _row_errors(rows: NDArray[np.float32], params: QParams, scheme: Scheme) -> NDArray[np.float64]:
    """Sum of squared errors of each row, with the codes that weights are clipped to."""
    lowest = scheme.qtype.qmin + (1 if scheme.symmetric and scheme.qtype.signed else 0)
    scale, zero = params.scale[:, None], params.zero_point.astype(np.float32)[:, None]
    errors = np.empty(len(rows))
    step = max(1, _BLOCK // max(rows.shape[1], 1))
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        codes = np.rint(rows[part] / scale[part])
        np.clip(codes, lowest - zero[part], scheme.qtype.qmax - zero[part], out=codes)
        codes *= scale[part]
        codes -= rows[part]
        errors[part] = np.einsum("ij,ij->i", codes, codes)
    return errors


def _rows(array: NDArray[Any], scheme: Scheme) -> NDArray[np.float32]:
    """One row per scale."""
    values = np.asarray(array, np.float32)
    if isinstance(scheme.granularity, PerChannel):
        values = np.moveaxis(values, scheme.granularity.axis, 0)
        return np.ascontiguousarray(values).reshape(values.shape[0], -1)
    return np.ascontiguousarray(values).reshape(1, -1)


def _shaped(params: QParams, scheme: Scheme) -> QParams:
    if isinstance(scheme.granularity, PerChannel):
        return replace(params, axis=scheme.granularity.axis)
    return QParams(params.scale.reshape(()), params.zero_point.reshape(()), params.qtype)
