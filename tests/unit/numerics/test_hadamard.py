"""Rotations are orthogonal, even, repeatable, and keep the mean where asked."""

from __future__ import annotations

import numpy as np
import pytest

from roundel.numerics.hadamard import hadamard, rotation


@pytest.mark.parametrize("size", [1, 2, 4, 8, 12, 16, 20, 24, 28, 36, 44, 48, 64, 96, 384, 768])
def test_rows_of_ones_and_minus_ones_are_orthogonal(size: int) -> None:
    found = hadamard(size)
    assert found is not None
    assert set(np.unique(found)) <= {-1.0, 1.0}
    np.testing.assert_array_equal(found @ found.T, size * np.eye(size))


@pytest.mark.parametrize("size", [3, 6, 10, 18, 25, 50])
def test_there_is_none_of_such_a_size(size: int) -> None:
    assert hadamard(size) is None


@pytest.mark.parametrize("size", [1, 2, 7, 12, 30, 64])
@pytest.mark.parametrize("keep_mean", [False, True])
def test_a_rotation_can_be_turned_back(size: int, keep_mean: bool) -> None:
    turn = rotation(size, seed=5, keep_mean=keep_mean)
    np.testing.assert_allclose(turn @ turn.T, np.eye(size), atol=1e-12)
    if keep_mean:
        rows = np.random.default_rng(0).normal(size=(4, size))
        np.testing.assert_allclose((rows @ turn).mean(axis=1), rows.mean(axis=1), atol=1e-12)


@pytest.mark.parametrize("keep_mean", [False, True])
def test_one_large_entry_is_spread_over_all(keep_mean: bool) -> None:
    size = 384
    turn = rotation(size, seed=1, keep_mean=keep_mean)
    assert np.abs(turn).max() < 2.5 / np.sqrt(size)


def test_the_seed_decides() -> None:
    first, again, other = (rotation(16, seed, keep_mean=True) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.1
