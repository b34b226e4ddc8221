"""Rounding that minimises the error of a layer's output instead of the error of its weights.

A layer's squared output error is tr(D H Dᵀ) for codes Q = T + D, target T and H the second moment of the
layer's inputs. All functions work on a batch of groups: targets (G, O, K), moments (G, K, K).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import Lock

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from roundel.numerics.packed import Packed, PackedParams, packed_params
from roundel.types import Doubles, PackedScheme

_BLOCK = 64


def damped(moment: Doubles, share: float) -> Doubles:
    """The moment with a share of its mean diagonal added; never singular."""
    size = moment.shape[-1]
    diagonal = np.einsum("gkk->gk", moment)
    extra = share * diagonal.mean(-1, keepdims=True) + 1e-12
    result = moment.copy()
    result[:, np.arange(size), np.arange(size)] += np.where(diagonal > 0, extra, np.maximum(extra, 1e-6))
    return result


def least_squares(weight: Doubles, moment: Doubles, cross: Doubles, share: float) -> Doubles:
    """Weights that best map the seen inputs to the wanted outputs, held to the given ones by a ridge.

    Args:
        weight: (G, O, K), the float weights.
        moment: (G, K, K), E[x xᵀ] of the inputs that the layer will really see, centred.
        cross: (G, O, K), E[y xᵀ] of the outputs that it should give, centred.
        share: strength of the ridge, as a share of the moment's mean diagonal.
    """
    held = damped(moment, share)
    ridge = held - moment
    wanted = cross + weight @ ridge
    return np.asarray(np.linalg.solve(held, wanted.transpose(0, 2, 1)).transpose(0, 2, 1))


def factor(moment: Doubles) -> Doubles:
    """The upper Cholesky factor of the inverse of a (damped) moment: how an error spreads to later inputs."""
    try:
        return _factor(moment)
    except np.linalg.LinAlgError:  # rounded sums may leave a moment a little below zero: lift it
        powers = np.linalg.eigvalsh(moment)
        lift = np.maximum(1e-6 * powers[:, -1] - powers[:, 0], 1e-12)
        return _factor(moment + lift[:, None, None] * np.eye(moment.shape[-1]))


def _factor(moment: Doubles) -> Doubles:
    inverse = np.linalg.inv(moment)
    lower = np.linalg.cholesky((inverse + inverse.transpose(0, 2, 1)) / 2)
    return np.asarray(lower.transpose(0, 2, 1), np.float64)


def compensated(target: Doubles, upper: Doubles, limits: tuple[int, int]) -> Doubles:
    """Round input by input, each time correcting the inputs that are still to come.

    Args:
        target: (G, O, K) in units of the scale.
        upper: (G, K, K), from `factor`.
        limits: smallest and largest code.
    """
    size = target.shape[-1]
    work, codes = target.copy(), np.empty_like(target)
    for start in range(0, size, _BLOCK):
        stop = min(start + _BLOCK, size)
        errors = np.empty((*target.shape[:2], stop - start))
        for k in range(start, stop):
            column = work[:, :, k]
            codes[:, :, k] = np.clip(np.rint(column), *limits)
            error = (column - codes[:, :, k]) / upper[:, k, k, None]
            errors[:, :, k - start] = error
            work[:, :, k + 1 : stop] -= error[:, :, None] * upper[:, None, k, k + 1 : stop]
        if stop < size:
            work[:, :, stop:] -= errors @ upper[:, start:stop, stop:]
    return codes


def descend(
    codes: Doubles, target: Doubles, moment: Doubles, limits: tuple[int, int], sweeps: int = 3
) -> Doubles:
    """Coordinate descent over the codes: each move lowers tr(D H Dᵀ), so the result is never worse."""
    codes = codes.copy()
    size = codes.shape[-1]
    diagonal = np.maximum(np.einsum("gkk->gk", moment), 1e-30)
    slope = (codes - target) @ moment
    for _ in range(sweeps):
        moved = False
        for k in range(size):
            step = -np.rint(slope[:, :, k] / diagonal[:, k, None])
            step = np.clip(codes[:, :, k] + step, *limits) - codes[:, :, k]
            if not step.any():
                continue
            moved = True
            codes[:, :, k] += step
            if len(codes) == 1:
                rows = np.flatnonzero(step[0])
                slope[0, rows] += step[0, rows, None] * moment[0, k]
            else:
                slope += step[:, :, None] * moment[:, None, k]
        if not moved:
            break
    return codes


_SPAN = 128  # inputs between two updates of all behind them: a whole number of blocks, or a part of one
_SLAB = 8_000_000  # weights at a time: rows do not depend on each other


@dataclass(frozen=True, slots=True, eq=False)
class ErrorSpread:
    """How the error of one input's weights is made up for by others.

    Attributes:
        order: the inputs, first to be rounded first.
        ordered: whether that is another order than theirs.
        upper: upper Cholesky factor of the inverse second moment, in that order.
        power: mean square of each input, in its own order.
    """

    order: NDArray[np.intp]
    ordered: bool
    upper: Doubles
    power: Doubles


def spread(moment: Doubles, damping: float, *, act_order: bool) -> ErrorSpread:
    """Prepare the rounding of all weights that read the same inputs.

    Args:
        moment: (inputs, inputs), the mean of x xᵀ.
        damping: share of its mean diagonal to add to it.
        act_order: begin with the inputs of the most power.
    """
    power = np.diagonal(moment).copy()
    order = np.argsort(-power, kind="stable") if act_order else np.arange(len(power))
    held = damped(moment[None], damping)[:, order[:, None], order]
    return ErrorSpread(order, act_order, factor(held)[0], power)


def gptq(
    target: NDArray[np.floating], spreading: ErrorSpread, scheme: PackedScheme, *, search: bool
) -> Packed:
    """Codes whose output error is small on the inputs behind the moment.

    Args:
        target: (outputs, inputs), the weights that would be best without rounding.
        spreading: from the inputs that they meet.
        scheme: how to store them.
        search: choose each block's range by least squared error; otherwise it holds the extremes.
    """
    rows = max(1, _SLAB // target.shape[1])
    parts = []
    for start in range(0, len(target), rows):
        slab = target[start : start + rows].astype(np.float64)
        done = _rounded(slab, spreading, scheme, search)
        parts.append((done.codes, done.params.scale, done.params.zero))
    codes, scale, zero = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Packed(codes, PackedParams(scale, zero), scheme)


def _rounded(target: Doubles, spreading: ErrorSpread, scheme: PackedScheme, search: bool) -> Packed:
    order, upper, ordered = spreading.order, spreading.upper, spreading.ordered
    # In the inputs' own order, each block's range is chosen when its turn comes; these are for room only.
    params = packed_params(target, scheme, search=search and ordered, importance=spreading.power)
    scale, zero = (part[:, order] for part in params.columns(scheme.size, target.shape[1]))
    work, codes = target[:, order], np.empty(target.shape, np.uint8)
    size = target.shape[1]
    for start in range(0, size, _SPAN):
        stop = min(start + _SPAN, size)
        errors = np.empty((len(target), stop - start))
        for k in range(start, stop):
            if k % scheme.size == 0 and not ordered:
                block = slice(k, min(k + scheme.size, size))
                moved = packed_params(
                    work[:, block], scheme, search=search, importance=spreading.power[block]
                )
                params.scale[:, k // scheme.size] = moved.scale[:, 0]
                params.zero[:, k // scheme.size] = moved.zero[:, 0]
                scale[:, block], zero[:, block] = moved.columns(scheme.size, block.stop - k)
            column = work[:, k]
            code = np.clip(np.rint(column / scale[:, k] + zero[:, k]), 0, scheme.top)
            codes[:, order[k]] = code
            error = (column - (code - zero[:, k]) * scale[:, k]) / upper[k, k]
            errors[:, k - start] = error
            work[:, k + 1 : stop] -= error[:, None] * upper[k, k + 1 : stop]
        work[:, stop:] -= errors @ upper[start:stop, stop:]
    return Packed(codes, params, scheme)


class _SharedLimit:
    """The limit is the process's: the first who wants it sets it, and the last one lifts it."""

    def __init__(self) -> None:
        self._lock, self._users, self._set = Lock(), 0, ExitStack()
        self._libraries: ThreadpoolController | None = None

    def enter(self) -> None:
        with self._lock:
            if self._libraries is None:  # once, for searching takes milliseconds
                self._libraries = ThreadpoolController()
            if self._users == 0:
                self._set.enter_context(self._libraries.limit(limits=1, user_api="blas"))
            self._users += 1

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._set.close()


_limit = _SharedLimit()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """One thread of BLAS within; runs within runs, and in several threads at once, may all ask for it."""
    _limit.enter()
    try:
        yield
    finally:
        _limit.leave()
