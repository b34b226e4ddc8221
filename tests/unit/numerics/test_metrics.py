"""Closeness of arrays."""

from __future__ import annotations

import math

import numpy as np
import pytest

from roundel.numerics.metrics import Closeness, decibels


def test_one_percent_of_noise_is_forty_decibels() -> None:
    signal = np.ones(1000)
    assert Closeness.of(signal, signal * 1.01).sqnr_db == pytest.approx(40)


def test_equal_arrays() -> None:
    same = Closeness.of(np.ones(3), np.ones(3))
    assert same.sqnr_db == math.inf
    assert same.cosine == pytest.approx(1)


def test_silence() -> None:
    assert Closeness.of(np.zeros(3), np.zeros(3)).sqnr_db == math.inf
    assert Closeness.of(np.zeros(3), np.zeros(3)).cosine == 1
    assert Closeness.of(np.zeros(3), np.ones(3)).sqnr_db == -math.inf
    assert Closeness.of(np.ones(3), np.array([1, 1, np.inf])).sqnr_db == -math.inf
    assert Closeness.of(np.zeros(3), np.ones(3)).cosine == 0


def test_merging_is_as_if_joined() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 40)), rng.normal(size=(2, 40))
    parts = Closeness.of(a[0], b[0]).merge(Closeness.of(a[1], b[1]))
    whole = Closeness.of(a, b)
    assert parts.sqnr_db == pytest.approx(whole.sqnr_db)
    assert parts.cosine == pytest.approx(whole.cosine)
    assert (parts.worst, parts.count) == (whole.worst, whole.count)


def test_the_angle() -> None:
    assert Closeness.of(np.array([1.0, 0]), np.array([0, 1.0])).cosine == 0
    assert Closeness.of(np.array([1.0, 2]), np.array([-1.0, -2])).cosine == pytest.approx(-1)


def test_no_elements() -> None:
    assert Closeness.of(np.zeros(0), np.zeros(0)).count == 0


@pytest.mark.parametrize(
    ("signal", "noise", "wanted"),
    [
        (4, 4, 0),
        (1, 0, math.inf),
        (0, 0, math.inf),
        (0, 1, -math.inf),
        (1, math.inf, -math.inf),
        (1e-300, 1e300, -6000),
    ],
)
def test_decibels(signal: float, noise: float, wanted: float) -> None:
    assert decibels(signal, noise) == pytest.approx(wanted)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_number_is_infinitely_far(value: float) -> None:
    far = Closeness.of(np.ones(3), np.array([1.0, value, 1.0]))
    assert far.sqnr_db == -math.inf
    assert far.worst == math.inf
