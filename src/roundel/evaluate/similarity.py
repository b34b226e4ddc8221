"""How alike two results are: cosine, L2, PSNR and SSIM."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundel.evaluate.picture import planes
from roundel.numerics.metrics import decibels

_SIDE, _SIGMA = 11, 1.5
_K1, _K2 = 0.01, 0.03
_OFFSETS = np.arange(_SIDE) - _SIDE // 2
_KERNEL = np.exp(-(_OFFSETS**2) / (2 * _SIGMA**2))
_KERNEL /= _KERNEL.sum()


@dataclass(frozen=True, slots=True)
class Similarity:
    """One pair of results.

    Attributes:
        cosine: of the angle between them, as long vectors.
        l2: length of their difference.
        psnr_db: peak signal to noise; infinite when equal.
        ssim: structural similarity, 1 when equal; None for results that are not pictures.
    """

    cosine: float
    l2: float
    psnr_db: float
    ssim: float | None


def similarity(baseline: NDArray[Any], other: NDArray[Any]) -> Similarity:
    """Compare two arrays of one shape.

    The peak of 8-bit images is 255. Of other arrays it is the baseline's largest magnitude for PSNR, and the
    width of the baseline's range for SSIM.
    """
    a, b = np.asarray(baseline, np.float64), np.asarray(other, np.float64)
    pixels = baseline.dtype == np.uint8
    difference = a - b
    squares = float(np.vdot(difference, difference))
    peak = 255.0 if pixels else float(np.abs(a).max()) if a.size else 0.0
    span = 255.0 if pixels else float(np.ptp(a)) if a.size else 0.0
    return Similarity(
        _cosine(a, b), math.sqrt(squares), decibels(peak**2 * a.size, squares), ssim(a, b, span)
    )


def _cosine(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    norm = float(np.linalg.norm(a.ravel()) * np.linalg.norm(b.ravel()))
    if norm == 0:
        return 1.0 if not a.any() and not b.any() else 0.0
    return max(-1.0, min(1.0, float(np.vdot(a, b)) / norm))


def ssim(a: NDArray[np.float64], b: NDArray[np.float64], span: float) -> float | None:
    """Structural similarity, the mean over all planes and places where the window fits.

    Args:
        a: one picture, or a stack of them.
        b: the other.
        span: width of the range of values (255 for pixels).

    Returns:
        None when the arrays are not pictures or smaller than the window.
    """
    first, second = planes(a), planes(b)
    if first is None or second is None or min(first.shape[1:]) < _SIDE:
        return None
    if span == 0:
        return 1.0 if np.array_equal(a, b) else 0.0
    c1, c2 = (_K1 * span) ** 2, (_K2 * span) ** 2
    values = []
    for x, y in zip(first, second, strict=True):
        mean_x, mean_y = _blur(x), _blur(y)
        var_x, var_y = _blur(x * x) - mean_x**2, _blur(y * y) - mean_y**2
        covariance = _blur(x * y) - mean_x * mean_y
        top = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
        values.append(top / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2)))
    return float(np.mean(values))


def _blur(plane: NDArray[np.float64]) -> NDArray[np.float64]:
    """The Gaussian mean around every place where the window fits, first down, then across."""
    height, width = plane.shape[0] - _SIDE + 1, plane.shape[1] - _SIDE + 1
    rows = sum(weight * plane[i : i + height] for i, weight in enumerate(_KERNEL))
    return np.asarray(sum(weight * rows[:, i : i + width] for i, weight in enumerate(_KERNEL)))
