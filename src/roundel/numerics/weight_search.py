"""Scales with the least squared error for constants, computed on the values themselves.

Channels are few values each, too few for a histogram; all channels of a tensor are searched side by side.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundel.numerics.affine import params_from_range, weight_params
from roundel.numerics.histogram import bins_of
from roundel.numerics.scale_search import (
    largest_exponent,
    least_squares_range,
    non_overflow,
    non_overflow_exponent,
    power_of_two_least_squares,
)
from roundel.types import PerChannel, PerTensor, QParams, Scheme

_GRID = np.geomspace(1.0, 0.1, 16)
_RATIO = float(_GRID[1] / _GRID[0])
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
    rounds = [_GRID, *(_RATIO ** (np.array([-3, -2, -1, 1, 2, 3]) * reach / 4) for reach in (1.0, 0.25))]
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
