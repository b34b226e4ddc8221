"""Rounding by a layer's output error: factors, compensation, descent, least squares."""

from __future__ import annotations

import numpy as np
import pytest

from roundel.improve.moments import Moments
from roundel.numerics.rounding import compensated, damped, descend, factor, least_squares
from roundel.types import Doubles

LIMITS = (-128, 127)


def _problem(seed: int, groups: int = 2, outputs: int = 5, size: int = 12) -> tuple[Doubles, Doubles]:
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(groups, 200, size)) @ rng.normal(size=(groups, size, size))
    target = rng.normal(size=(groups, outputs, size)) * 20
    return target, inputs.transpose(0, 2, 1) @ inputs / 200


def _error(codes: Doubles, target: Doubles, moment: Doubles) -> float:
    off = codes - target
    return float(np.einsum("gok,gkl,gol->", off, moment, off))


def test_the_factor_is_that_of_the_inverse() -> None:
    _, moment = _problem(0)
    upper = factor(moment)
    np.testing.assert_allclose(
        upper.transpose(0, 2, 1) @ upper @ moment, np.tile(np.eye(12), (2, 1, 1)), atol=1e-8
    )
    assert (np.tril(upper, -1) == 0).all()


def test_a_moment_a_little_below_zero_is_factored_all_the_same() -> None:
    moment = np.stack([np.diag([-9e-6, 1e-6, 1e-6]), np.eye(3)])
    upper = factor(moment)
    assert np.isfinite(upper).all()
    np.testing.assert_allclose(upper[1], np.eye(3), rtol=1e-4)


@pytest.mark.parametrize("seed", range(8))
def test_compensation_beats_plain_rounding_and_descent_never_loses(seed: int) -> None:
    target, moment = _problem(seed)
    plain = np.clip(np.rint(target), *LIMITS)
    better = compensated(target, factor(damped(moment, 0.01)), LIMITS)
    assert _error(better, target, moment) < _error(plain, target, moment)
    for start in (plain, better):
        assert _error(descend(start, target, moment, LIMITS), target, moment) <= _error(start, target, moment)


def test_codes_stay_within_their_limits() -> None:
    target, moment = _problem(3)
    codes = compensated(target * 50, factor(damped(moment, 0.01)), LIMITS)
    codes = descend(codes, target * 50, moment, LIMITS)
    assert codes.min() >= LIMITS[0]
    assert codes.max() <= LIMITS[1]


def test_least_squares_finds_the_weights_behind_the_outputs() -> None:
    target, moment = _problem(5)
    start = target + np.random.default_rng(6).normal(size=target.shape)
    found = least_squares(start, moment, target @ moment, 1e-9)
    np.testing.assert_allclose(found, target, atol=1e-3)


def test_a_constant_input_has_no_variance() -> None:
    rng = np.random.default_rng(7)
    inputs = rng.normal(size=(5000, 1, 3)).astype(np.float32)
    inputs[:, :, 1] = 203.0
    sums = Moments()
    sums.add(inputs, rng.normal(size=(5000, 1, 2)).astype(np.float32))
    centred = sums.centred()
    assert (centred.xx[0, 1] == 0).all()
    assert (centred.xx[0, :, 1] == 0).all()
    assert (centred.xy[0, :, 1] == 0).all()
    assert centred.xx[0, 0, 0] == pytest.approx(1, rel=0.1)
