"""One layer's solution: what teaches it, and what judges it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from roundel.improve import rounding as module
from roundel.improve.moments import HeldRows, Missing, Moments, Single, parts_of
from roundel.improve.rounding import Problem, solve
from roundel.numerics.rounding import correction
from roundel.types import FloatArray

WEIGHT = np.random.default_rng(0).normal(size=(1, 3, 8))


def rows(seed: int, shift: float = 0.0) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    shared = rng.normal(
        0, 20, (1, 400, 1)
    )  # inputs that rise and fall together: one error can make up another
    x = np.rint(shared + rng.normal(0, 4, (1, 400, 8)))
    y = np.einsum("gnk,gok->gno", x, WEIGHT) * 0.05 + shift
    return x.astype(np.float32), y.astype(np.float32)


def problem(held: tuple[NDArray[np.float32], NDArray[np.float32]]) -> Problem:
    train = Moments()
    train.add(*rows(1))
    return Problem(
        weight=WEIGHT,
        bias=np.zeros((1, 3)),
        has_bias=True,
        input_scale=0.05,
        scale=np.full((1, 1, 1), 0.2),
        limits=(-15, 15),
        factors=(1.0,),
        train=train,
        held=HeldRows(*held),
    )


def test_samples_that_judge_do_not_teach(monkeypatch: pytest.MonkeyPatch) -> None:
    def always(_: object, __: object, train: Missing) -> tuple[float, FloatArray]:
        return 0.1, correction(train.moment, train.cross, 0.1)

    monkeypatch.setattr(module, "_choose_ridge", always)
    one, other = (solve(problem(rows(seed, shift))) for seed, shift in ((2, 0.0), (3, 5.0)))
    assert np.array_equal(one.codes, other.codes)
    assert np.array_equal(one.bias, other.bias)
    assert one.after != other.after


def test_the_error_is_that_of_the_judging_rows() -> None:
    x, y = rows(2)
    found = solve(problem((x, y)))
    real = found.codes * found.scale * 0.05
    seen = np.einsum("gnk,gok->gno", x.astype(np.float64), real) + found.bias[:, None]
    assert found.kept
    assert found.after == pytest.approx(np.square(seen - y).mean(1).sum(), rel=1e-3)


def test_a_solution_that_the_judging_rows_refuse_is_not_kept() -> None:
    x, _ = rows(2)
    plain = np.rint(WEIGHT / 0.2) * 0.2 * 0.05  # held-out outputs that plain rounding gives exactly
    found = solve(problem((x, np.einsum("gnk,gok->gno", x, plain).astype(np.float32))))
    assert not found.kept


def test_a_layer_in_parts_is_solved_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only products of inputs of one part are kept: what they tell is still used, and errors stay true."""
    whole = problem(rows(2))
    cut = replace(whole, train=Moments(3))
    cut.train.add(*rows(1))
    assert cut.train.xx.shape == (3, 3, 3)
    found = solve(cut)
    assert found.kept
    assert found.codes.shape == whole.weight.shape
    x, y = rows(1)
    seen = np.einsum("gnk,gok->gno", x.astype(np.float64), found.codes * found.scale * 0.05)
    assert np.allclose((seen + found.bias[:, None] - y).mean(1), 0, atol=1e-4)


def test_parts_are_few_and_small() -> None:
    assert parts_of(768) == 1
    for size in (769, 2049, 8192, 65536, 500_000):
        part = -(-size // parts_of(size))
        assert 32 <= part <= 512
        assert part * size <= 1 << 25  # numbers in all moments of one group


def test_what_a_few_samples_miss_by_chance_is_not_made_up_for() -> None:
    rng = np.random.default_rng(9)
    weight, bias = rng.normal(size=(1, 40, 5)), rng.normal(size=(1, 40))
    x = rng.normal(size=(6, 1, 5))
    given = np.einsum("gok,sgk->sgo", weight, x) + bias
    turned = weight.transpose(0, 2, 1)
    by_chance = Single(x, given + rng.normal(size=given.shape), 6)
    by_nature = Single(x, given + 3 + 0.1 * rng.normal(size=given.shape), 6)
    assert by_chance.common(turned, bias) < 0.3
    assert by_nature.common(turned, bias) > 0.99
    assert Single(x[:1], given[:1] + 3, 1).common(turned, bias) == 0, "one sample tells no variance"


def test_a_layer_without_a_bias_answers_for_its_mean() -> None:
    """Where inputs are far from zero on average, rounding must not move the error into that average."""
    generator = np.random.default_rng(1)
    x = np.rint(generator.normal(30, 3, (1, 400, 8))).astype(np.float32)
    y = (np.einsum("gnk,gok->gno", x.astype(np.float64), WEIGHT) * 0.05).astype(np.float32)
    train = Moments()
    train.add(x, y)
    found = solve(replace(problem((x, y)), train=train, has_bias=False))
    alone = solve(replace(problem((x, y)), train=train))
    assert not found.bias.any()
    assert found.kept
    means = [
        np.abs((np.einsum("gnk,gok->gno", x, s.codes * s.scale * 0.05) - y).mean(1)).max()
        for s in (found, alone)
    ]
    assert means[0] < 0.8 * means[1]


def test_rows_of_a_layer_in_parts_count_as_they_weigh() -> None:
    x, y = rows(1)
    weights = np.where(np.arange(400) < 100, 1.0, 0.0).astype(np.float32)[None, :, None]
    heavy, few = Moments(2), Moments(2)
    heavy.add(x, y, weights)
    few.add(x[:, :100], y[:, :100])
    np.testing.assert_allclose(heavy.xx, few.xx, rtol=1e-6)


def test_rows_in_front_of_a_norm_count_relative_to_their_power() -> None:
    wanted = np.ones((1, 4, 8), np.float32)
    wanted[0, 3] = 100
    weights = module._relative(wanted)
    assert weights.shape == (1, 4, 1)
    np.testing.assert_allclose(weights[0, :, 0], [1, 1, 1, 1e-4])
