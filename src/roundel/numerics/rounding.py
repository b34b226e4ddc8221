"""Rounding that minimises the error of a layer's output instead of the error of its weights.

A layer's squared output error is tr(D H Dᵀ) for codes Q = T + D, target T and H the second moment of the
layer's inputs. All functions work on a batch of groups: targets (G, O, K), moments (G, K, K).
"""

from __future__ import annotations

import numpy as np

from roundel.types import Doubles

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
