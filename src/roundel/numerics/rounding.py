"""Rounding that minimises the error of a layer's output instead of the error of its weights.

A layer's squared output error is tr(Dᵀ H D) for codes Q = T + D, target T and H the second moment of the
layer's inputs. All functions work on a batch of groups: targets (G, K, O), moments (G, K, K). The weights
of an input lie together, for they are rounded together.
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
from roundel.types import Doubles, FloatArray, PackedScheme

_BLOCK = 64
_MOST_TOGETHER, _APART = 8, 36  # inputs: at most at once, and how many of them there must be for each


def damped(moment: FloatArray, share: float) -> FloatArray:
    """The moment with a share of its mean diagonal added; never singular."""
    size = moment.shape[-1]
    diagonal = np.einsum("gkk->gk", moment)
    extra = share * diagonal.mean(-1, keepdims=True) + 1e-12
    result = moment.copy()
    result[:, np.arange(size), np.arange(size)] += np.where(diagonal > 0, extra, np.maximum(extra, 1e-6))
    return result


def shrunk(moment: FloatArray, rows: float) -> FloatArray:
    """The moment with less between different inputs, by what so few rows show even of independent ones.

    The share that goes is the variance that products of normal numbers would have, over what was seen: a
    linear shrinkage towards the diagonal (Ledoit and Wolf; Schäfer and Strimmer).
    """
    diagonal = np.einsum("gkk->gk", moment).astype(np.float64)
    squares = np.square(diagonal).sum(1)
    between = np.einsum("gkl,gkl->g", moment, moment, dtype=np.float64) - squares
    chance = (np.square(diagonal.sum(1)) - squares + between) / max(rows, 1.0)
    kept = 1 - np.clip(chance / np.maximum(between, 1e-300), 0, 1)
    result = moment * kept[:, None, None].astype(moment.dtype)
    np.einsum("gkk->gk", result)[...] = diagonal
    return np.asarray(result)


def correction(moment: FloatArray, missing: FloatArray, share: float) -> FloatArray:
    """What to add to weights so that they best map the seen inputs to the wanted outputs, held by a ridge.

    Args:
        moment: (G, K, K), E[x xᵀ] of the inputs that the layer will really see, centred.
        missing: (G, K, O), E[x eᵀ] of what the weights as they are leave of the outputs, centred.
        share: strength of the ridge, as a share of the moment's mean diagonal.
    """
    return np.asarray(np.linalg.solve(damped(moment, share), missing))


def handed_on(moment: FloatArray) -> FloatArray:
    """Row k: the share of each earlier input's error that input k has to make up for; 1 at k, 0 behind.

    With H = U Uᵀ for an upper U, an error d of the weights costs |d U|²: its part k is U_kk times d_k and the
    shares of the errors before.

    Args:
        moment: (G, K, K), damped.
    """
    try:
        lower = np.linalg.cholesky(moment[:, ::-1, ::-1])
    except np.linalg.LinAlgError:  # rounded sums may leave a moment a little below zero: lift it
        lower = np.linalg.cholesky(_lifted(moment)[:, ::-1, ::-1])
    upper = lower[:, ::-1, ::-1]
    return np.ascontiguousarray((upper / np.einsum("gkk->gk", upper)[:, None]).transpose(0, 2, 1))


def _lifted(moment: FloatArray) -> FloatArray:
    powers = np.linalg.eigvalsh(moment)
    lift = np.maximum(1e-6 * powers[:, -1] - powers[:, 0], 1e-12).astype(moment.dtype)
    return np.asarray(moment + lift[:, None, None] * np.eye(moment.shape[-1], dtype=moment.dtype))


def taken_together(size: int) -> int:
    """Of so many inputs, how many are rounded at once: what they do to each other matters little then."""
    return min(_MOST_TOGETHER, max(1, size // _APART))


def apart(size: int, together: int) -> NDArray[np.intp]:
    """An order in which inputs that are rounded together lie far apart: neighbours are most alike."""
    rounds = -(-size // together)
    return np.argsort(np.arange(size) % rounds, kind="stable")


def compensated(
    target: FloatArray, shares: FloatArray, limits: tuple[int, int], together: int = 1
) -> FloatArray:
    """Round input by input, each making up for what those before have missed.

    Args:
        target: (G, K, O) in units of the scale.
        shares: (G, K, K), from `handed_on`.
        limits: smallest and largest code.
        together: inputs that are rounded at once, without making up for each other.
    """
    codes, missed = np.empty_like(target), np.empty_like(target)
    for block in _blocks(target.shape[1]):
        start = block.start
        ahead = target[:, block] - shares[:, block, :start] @ missed[:, :start]
        for first in range(start, block.stop, together):
            some = slice(first, min(first + together, block.stop))
            wanted = ahead[:, some.start - start : some.stop - start]
            if first > start:
                wanted -= shares[:, some, start:first] @ missed[:, start:first]
            codes[:, some] = _within(np.rint(wanted, out=wanted), limits)
            np.subtract(wanted, target[:, some], out=missed[:, some])
    return codes


def descend(
    codes: FloatArray,
    target: FloatArray,
    moment: FloatArray,
    limits: tuple[int, int],
    sweeps: int = 3,
    together: int = 1,
) -> FloatArray:
    """Coordinate descent over the codes: each move lowers tr(Dᵀ H D), so the result is never worse.

    Args:
        codes, target: (G, K, O) in units of the scale.
        moment: (G, K, K).
        limits: smallest and largest code.
        sweeps: how often each code may move.
        together: inputs whose codes move at once, where that lowers the sum.
    """
    codes = codes.copy()
    missed = codes - target
    diagonal = np.maximum(np.einsum("gkk->gk", moment), 1e-30)[:, :, None]
    for _ in range(sweeps):
        moved = False
        for block in _blocks(codes.shape[1]):
            start = block.start
            slope = moment[:, block] @ missed
            steps = np.zeros_like(slope)
            for first in range(start, block.stop, together):
                some = slice(first, min(first + together, block.stop))
                here = slope[:, some.start - start : some.stop - start]
                if first > start:
                    here += moment[:, some, start:first] @ steps[:, : first - start]
                now = codes[:, some]
                step = _within(now - np.rint(here / diagonal[:, some]), limits) - now
                if together > 1:
                    gain = (step * (2 * here + moment[:, some, some] @ step)).sum(1, keepdims=True)
                    step *= gain < 0
                steps[:, some.start - start : some.stop - start] = step
                now += step
            moved = moved or bool(steps.any())
            missed[:, block] += steps
        if not moved:
            break
    return codes


def _within(codes: FloatArray, limits: tuple[int, int]) -> FloatArray:
    """Clip in place; what NumPy has for it takes longer to call than to do."""
    return np.asarray(np.minimum(np.maximum(codes, limits[0], out=codes), limits[1], out=codes))


def _blocks(size: int) -> Iterator[slice]:
    for start in range(0, size, _BLOCK):
        yield slice(start, min(start + _BLOCK, size))


_SPAN = 128  # inputs for which what those before them have missed is added up at once
_SLAB = 8_000_000  # weights at a time: rows do not depend on each other


@dataclass(frozen=True, slots=True, eq=False)
class ErrorSpread:
    """How the error of one input's weights is made up for by others.

    Attributes:
        order: the inputs, first to be rounded first.
        ordered: whether that is another order than theirs.
        shares: of each one's error that those behind it take over, in that order.
        power: mean square of each input, in its own order.
    """

    order: NDArray[np.intp]
    ordered: bool
    shares: FloatArray
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
    return ErrorSpread(order, act_order, handed_on(held)[0], power)


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
    order, shares, ordered = spreading.order, spreading.shares, spreading.ordered
    # In the inputs' own order, each block's range is chosen when its turn comes; these are for room only.
    params = packed_params(target, scheme, search=search and ordered, importance=spreading.power)
    scale, zero = (part[:, order] for part in params.columns(scheme.size, target.shape[1]))
    codes, wanted = np.empty(target.shape, np.uint8), target[:, order]
    size, missed = target.shape[1], np.zeros_like(wanted)

    for start in range(0, size, _SPAN):
        stop = min(start + _SPAN, size)
        ahead = wanted[:, start:stop] - missed[:, :start] @ shares[start:stop, :start].T
        for k in range(start, stop):
            if k % scheme.size == 0 and not ordered:
                block = slice(k, min(k + scheme.size, size))
                seen = wanted[:, block] - missed[:, :k] @ shares[block, :k].T
                moved = packed_params(seen, scheme, search=search, importance=spreading.power[block])
                params.scale[:, k // scheme.size] = moved.scale[:, 0]
                params.zero[:, k // scheme.size] = moved.zero[:, 0]
                scale[:, block], zero[:, block] = moved.columns(scheme.size, block.stop - k)
            column = ahead[:, k - start] - missed[:, start:k] @ shares[k, start:k]
            code = np.clip(np.rint(column / scale[:, k] + zero[:, k]), 0, scheme.top)
            codes[:, order[k]] = code
            missed[:, k] = (code - zero[:, k]) * scale[:, k] - wanted[:, k]
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
