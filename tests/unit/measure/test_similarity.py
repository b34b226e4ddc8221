"""The four metrics, against definitions written out the long way."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers import normal, rng
from roundel.measure.folders import similarity, ssim


def slow_ssim(x: NDArray[np.float64], y: NDArray[np.float64], span: float) -> float:
    """Wang et al. 2004, one window after the other."""
    at = np.arange(11) - 5
    window = np.exp(-(at[:, None] ** 2 + at[None, :] ** 2) / (2 * 1.5**2))
    window /= window.sum()
    c1, c2 = (0.01 * span) ** 2, (0.03 * span) ** 2
    values = []
    for i in range(x.shape[0] - 10):
        for j in range(x.shape[1] - 10):
            a, b = x[i : i + 11, j : j + 11], y[i : i + 11, j : j + 11]
            ma, mb = (window * a).sum(), (window * b).sum()
            va, vb = (window * (a - ma) ** 2).sum(), (window * (b - mb) ** 2).sum()
            cov = (window * (a - ma) * (b - mb)).sum()
            values.append((2 * ma * mb + c1) * (2 * cov + c2) / ((ma**2 + mb**2 + c1) * (va + vb + c2)))
    return float(np.mean(values))


def test_ssim_has_its_mean_terms() -> None:
    x = rng(1).integers(0, 256, (17, 20)).astype(np.float64)
    y = np.clip(x * 0.8 + 30 + rng(2).normal(0, 12, x.shape), 0, 255)
    stacked = ssim(np.stack([x, y, x])[None], np.stack([y, y, x])[None], 255.0)
    assert ssim(x[None], y[None], 255.0) == pytest.approx(slow_ssim(x, y, 255.0), abs=1e-10)
    assert stacked == pytest.approx((slow_ssim(x, y, 255.0) + 2) / 3, abs=1e-10)


def test_a_brighter_flat_picture_is_not_structurally_different_noise_is() -> None:
    """With raw second moments instead of variances, brightness alone would decide."""
    flat = np.full((1, 20, 20), 100.0)
    assert ssim(flat, flat + 5, 255.0) == pytest.approx(0.9988, abs=1e-3)
    noise = rng(3).normal(0, 20, flat.shape)
    shown = ssim(flat, flat + noise, 255.0)
    assert shown is not None
    assert shown < 0.3


def test_cosine_l2_and_psnr() -> None:
    a, b = np.array([[3.0, 4.0]], np.float32), np.array([[3.0, 5.0]], np.float32)
    score = similarity(a, b)
    assert score.cosine == pytest.approx(29 / (5 * math.sqrt(34)))
    assert score.l2 == pytest.approx(1.0)
    assert score.psnr_db == pytest.approx(10 * math.log10(16 / 0.5))
    assert score.ssim is None


def test_the_peak_of_pixels_is_255_and_of_negative_scores_their_size() -> None:
    dark = np.full((1, 12, 12), 10, np.uint8)
    assert similarity(dark, dark + np.uint8(1)).psnr_db == pytest.approx(10 * math.log10(255**2))
    scores = np.array([[-8.0, -4.0]])
    assert similarity(scores, scores + 2).psnr_db == pytest.approx(10 * math.log10(64 / 4))


def test_equal_results_are_exact() -> None:
    for array in (normal(1, 10), normal(1, 3, 16, 16), np.zeros((2, 4), np.float32)):
        score = similarity(array, array.copy())
        assert (score.cosine, score.l2, score.psnr_db) == (pytest.approx(1.0), 0.0, math.inf)


@pytest.mark.parametrize(
    ("shape", "pictures"),
    [
        ((1, 10), False),
        ((64, 1000), False),
        ((1, 3, 32, 32), True),
        ((1, 32, 24, 3), True),
        ((40, 30, 1), True),
    ],
)
def test_which_arrays_are_pictures(shape: tuple[int, ...], pictures: bool) -> None:
    array = normal(*shape)
    assert (similarity(array, array + 0.1).ssim is not None) == pictures
