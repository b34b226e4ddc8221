"""Rounding by a layer's output error: factors, compensation, descent, least squares."""

from __future__ import annotations

import numpy as np
import pytest

from roundel.improve.moments import Moments
from roundel.numerics.rounding import compensated, correction, damped, descend, handed_on, shrunk
from roundel.types import Doubles, FloatArray

LIMITS = (-128, 127)


def _problem(seed: int, groups: int = 2, outputs: int = 5, size: int = 12) -> tuple[Doubles, Doubles]:
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(groups, 200, size)) @ rng.normal(size=(groups, size, size))
    target = rng.normal(size=(groups, size, outputs)) * 20
    return target, inputs.transpose(0, 2, 1) @ inputs / 200


def _error(codes: FloatArray, target: FloatArray, moment: FloatArray) -> float:
    off = codes - target
    return float(np.einsum("gko,gkl,glo->", off, moment, off))


def _one_by_one(target: Doubles, moment: Doubles) -> Doubles:
    """As in the papers: each input's error, by the inverse moment of those behind it, onto their weights."""
    codes, work = np.empty_like(target), target.copy()
    for group, left in enumerate(work):
        for k in range(len(left)):
            inverse = np.linalg.inv(moment[group, k:, k:])
            codes[group, k] = np.clip(np.rint(left[k]), *LIMITS)
            left[k:] -= np.outer(inverse[:, 0] / inverse[0, 0], left[k] - codes[group, k])
    return codes


@pytest.mark.parametrize("size", [12, 150])
def test_compensation_is_that_of_the_inverse(size: int) -> None:
    target, moment = _problem(0, size=size)
    held = damped(moment, 0.05)
    np.testing.assert_array_equal(
        compensated(target, handed_on(held), LIMITS), _one_by_one(target, np.asarray(held))
    )


def test_a_moment_a_little_below_zero_is_factored_all_the_same() -> None:
    moment = np.stack([np.diag([-9e-6, 1e-6, 1e-6]), np.eye(3)])
    shares = handed_on(moment)
    assert np.isfinite(shares).all()
    np.testing.assert_allclose(shares[1], np.eye(3), rtol=1e-4)


@pytest.mark.parametrize("size", [12, 130])
@pytest.mark.parametrize("seed", range(4))
def test_compensation_beats_plain_rounding_and_descent_never_loses(seed: int, size: int) -> None:
    target, moment = _problem(seed, size=size)
    plain = np.clip(np.rint(target), *LIMITS)
    better = compensated(target, handed_on(damped(moment, 0.01)), LIMITS)
    assert _error(better, target, moment) < _error(plain, target, moment)
    for start in (plain, better):
        moved = descend(start, target, moment, LIMITS)
        assert _error(moved, target, moment) <= _error(start, target, moment)
    # Where no single move helps any more, none is made.
    settled = descend(plain, target, moment, LIMITS, sweeps=100)
    np.testing.assert_array_equal(descend(settled, target, moment, LIMITS), settled)


def test_codes_stay_within_their_limits() -> None:
    target, moment = _problem(3)
    codes = compensated(target * 50, handed_on(damped(moment, 0.01)), LIMITS)
    codes = descend(codes, target * 50, moment, LIMITS)
    assert codes.min() >= LIMITS[0]
    assert codes.max() <= LIMITS[1]


def test_the_correction_finds_the_weights_behind_the_outputs() -> None:
    target, moment = _problem(5)
    start = target + np.random.default_rng(6).normal(size=target.shape)
    found = start + correction(moment, moment @ (target - start), 1e-9)
    np.testing.assert_allclose(found, target, atol=1e-3)


def test_chance_products_of_few_rows_shrink_and_real_ones_stay() -> None:
    rng = np.random.default_rng(8)
    alone = rng.normal(size=(1, 20, 60))
    together = rng.normal(size=(1, 400, 1)) + 0.3 * rng.normal(size=(1, 400, 60))
    for rows, most, least in ((alone, 0.2, 0.0), (together, 1.0, 0.95)):
        moment = rows.transpose(0, 2, 1) @ rows / rows.shape[1]
        found = shrunk(moment, rows.shape[1])
        off = ~np.eye(60, dtype=bool)
        share = np.abs(found[0][off]).sum() / np.abs(moment[0][off]).sum()
        assert least <= share <= most
        np.testing.assert_array_equal(np.diagonal(found[0]), np.diagonal(moment[0]))


def test_a_constant_input_has_no_variance() -> None:
    rng = np.random.default_rng(7)
    inputs = rng.normal(size=(1, 5000, 3)).astype(np.float32)
    inputs[:, :, 1] = 203.0
    sums = Moments()
    sums.add(inputs, rng.normal(size=(1, 5000, 2)).astype(np.float32))
    seen = sums.around(np.zeros((1, 3, 2), np.float32))
    assert (seen.moment[0, 1] == 0).all()
    assert (seen.moment[0, :, 1] == 0).all()
    assert (seen.cross[0, 1] == 0).all()
    assert seen.moment[0, 0, 0] == pytest.approx(1, rel=0.1)
