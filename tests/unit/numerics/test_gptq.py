"""GPTQ: errors of early weights are made up for by later ones."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from helpers import normal
from roundel.numerics.packed import round_packed
from roundel.numerics.rounding import gptq, spread
from roundel.types import Doubles, PackedScheme


@cache
def entangled(width: int, seed: int = 0) -> Doubles:
    """Second moment of inputs that depend on each other, some far stronger than others."""
    mixed = normal(4 * width, width, seed=seed) @ normal(width, width, seed=seed + 1)
    mixed *= np.geomspace(0.1, 3, width)[::-1]
    return np.asarray(mixed.T @ mixed / len(mixed), np.float64)


def loss(moment: Doubles, got: Doubles, wanted: Doubles) -> float:
    miss = got.astype(np.float64) - wanted
    return float(((miss @ moment) * miss).sum())


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("size", [16, 128, 256])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
def test_the_output_error_falls(bits: int, size: int, symmetric: bool, act_order: bool) -> None:
    scheme = PackedScheme(bits, size, symmetric, mirrored=symmetric)
    weight, moment = normal(24, 300, seed=3), entangled(300)
    plain = round_packed(weight, scheme, search=True)
    solved = gptq(weight, spread(moment, 0.01, act_order=act_order), scheme, search=True)
    assert solved.codes.shape == weight.shape
    assert solved.codes.max() <= scheme.top
    assert loss(moment, solved.restored(), weight) < 0.7 * loss(moment, plain.restored(), weight)


@pytest.mark.parametrize("act_order", [True, False])
def test_inputs_that_are_independent_leave_nothing_to_make_up(act_order: bool) -> None:
    scheme, weight = PackedScheme(4, 32), normal(8, 100, seed=3)
    solved = gptq(weight, spread(np.eye(100), 1e-9, act_order=act_order), scheme, search=True)
    plain = round_packed(weight, scheme, search=True)
    np.testing.assert_array_equal(solved.codes, plain.codes)
    np.testing.assert_array_equal(solved.params.scale, plain.params.scale)


def test_damping_ties_the_weights_down() -> None:
    scheme, weight, moment = PackedScheme(4, 32), normal(16, 96, seed=3), entangled(96)
    plain = round_packed(weight, scheme, search=True).restored()
    moved = [
        np.abs(gptq(weight, spread(moment, share, act_order=False), scheme, search=True).restored() - plain)
        for share in (0.001, 1000.0)
    ]
    assert moved[1].mean() < 0.2 * moved[0].mean()


def test_inputs_that_are_always_zero() -> None:
    moment = entangled(64).copy()
    moment[10:20] = 0
    moment[:, 10:20] = 0
    for act_order in (True, False):
        solved = gptq(
            normal(8, 64), spread(moment, 0.01, act_order=act_order), PackedScheme(4, 16), search=True
        )
        assert np.isfinite(solved.restored()).all()
