"""Budgets in words."""

from __future__ import annotations

import math

import numpy as np
import pytest

from roundel.errors import RecipeError
from roundel.measure.scores import paired_margin
from roundel.trials.budget import Drop, DropUnit, parse_drop, parse_time
from roundel.trials.rungs import RungStep, RungVerdict


@pytest.mark.parametrize(
    ("text", "drop", "words"),
    [
        ("1%", Drop(1, DropUnit.RELATIVE), "1%"),
        (" 0.5 % ", Drop(0.5, DropUnit.RELATIVE), "0.5%"),
        ("2 percent", Drop(2, DropUnit.RELATIVE), "2%"),
        ("1 point", Drop(1, DropUnit.POINT), "1 point"),
        ("1.5 Points", Drop(1.5, DropUnit.POINT), "1.5 points"),
        ("2pp", Drop(2, DropUnit.POINT), "2 points"),
        ("1map", Drop(1, DropUnit.MAP), "1 mAP"),
        ("0.01", Drop(0.01, DropUnit.PLAIN), "0.01"),
        (0.01, Drop(0.01, DropUnit.PLAIN), "0.01"),
        (".5", Drop(0.5, DropUnit.PLAIN), "0.5"),
        ("0", Drop(0, DropUnit.PLAIN), "0"),
    ],
)
def test_drops(text: str | float, drop: Drop, words: str) -> None:
    assert parse_drop(text) == drop
    assert str(drop) == words


@pytest.mark.parametrize("text", ["", "one", "-1%", "1 %%", "1 pint", "nan", "inf"])
def test_no_drops(text: str) -> None:
    with pytest.raises(RecipeError, match="drop cannot be read") as caught:
        parse_drop(text)
    assert "1 point" in str(caught.value)


def test_each_unit_has_its_own_measure() -> None:
    # From 80 % to 79.2 %: one per cent of the metric, 0.8 points of a hundred, 0.008 of one.
    assert parse_drop("1%").of(0.8, 0.792) == pytest.approx(1.0)
    assert parse_drop("1 point").of(0.8, 0.792) == pytest.approx(0.8)
    assert parse_drop("0.01").of(0.8, 0.792) == pytest.approx(0.008)


def test_less_may_be_better() -> None:
    assert parse_drop("1%").of(2.0, 2.1, lower=True) == pytest.approx(5.0)
    assert parse_drop("1%").of(2.0, 1.9, lower=True) < 0


def test_a_budget_that_is_just_met_is_met() -> None:
    drop = parse_drop("1 point")
    assert drop.allows(drop.of(0.9, 0.89))
    assert not drop.allows(drop.of(0.9, 0.889))
    assert drop.allows(drop.of(0.9, 0.95))


def test_a_float_model_at_zero() -> None:
    drop = parse_drop("1%")
    assert drop.of(0.0, 0.0) == 0
    assert drop.of(0.0, -0.1) == math.inf
    assert drop.of(0.0, 0.1) == -math.inf


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10m", 600),
        ("90s", 90),
        ("1h30m", 5400),
        ("600", 600),
        (2.5, 2.5),
        ("1h 5 min 10 s", 3910),
        (None, None),
    ],
)
def test_times(text: str | float | None, seconds: float | None) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "0", "0s", "-5m", "10 d"])
def test_no_times(text: str) -> None:
    with pytest.raises(RecipeError, match="time cannot be read"):
        parse_time(text)


@pytest.mark.parametrize(("lost", "won"), [(0.0, 0.0), (0.01, 0.0), (0.05, 0.04), (0.3, 0.1)])
def test_the_interval_holds_the_truth_as_often_as_it_says(lost: float, won: float) -> None:
    rows, times = 200, 4000
    drawn = np.random.default_rng(0).multinomial(rows, [lost, won, 1 - lost - won], times)
    found = [abs((one - other) / rows - (lost - won)) for one, other, _ in drawn]
    margins = [paired_margin(int(one), int(other), rows) for one, other, _ in drawn]
    assert np.mean(np.array(found) <= np.array(margins)) >= 0.93
    assert min(margins) > 0


@pytest.mark.parametrize(
    ("lost", "margin", "verdict", "probability"),
    [
        (0.2, None, RungVerdict.MEETS, None),
        (1.2, None, RungVerdict.FAILS, None),
        (0.2, 0.7, RungVerdict.MEETS, 0.987),
        (0.2, 1.6, RungVerdict.UNDECIDED, 0.836),
        (1.0, 1.6, RungVerdict.UNDECIDED, 0.5),
        (1.14, 1.57, RungVerdict.UNDECIDED, 0.431),
        (3.0, 1.6, RungVerdict.FAILS, 0.007),
    ],
)
def test_the_interval_decides(
    lost: float, margin: float | None, verdict: RungVerdict, probability: float | None
) -> None:
    budget = parse_drop("1%")
    assert RungVerdict.of(budget, lost, margin) is verdict
    found = budget.probability(lost, margin)
    assert found == (probability if probability is None else pytest.approx(probability, abs=1e-3))
    step = RungStep("r", "R", verdict, drop=lost, margin=margin, probability=found)
    assert step.likely == (verdict is RungVerdict.MEETS or (found or 0) >= 0.8)


def test_the_probability_is_the_share_of_truths_within_the_budget() -> None:
    """Among models that look alike, as many are within the budget as is said."""
    generator, rows, budget = np.random.default_rng(1), 400, parse_drop("1 point")
    said, held = [], []
    for lost in generator.uniform(0, 0.05, 4000):
        one, other, _ = generator.multinomial(rows, [lost, 0.01, 0.99 - lost])
        drop = budget.of(0.9, 0.9 - (one - other) / rows)
        said.append(budget.probability(drop, 100 * paired_margin(int(one), int(other), rows)) or 0.0)
        held.append(lost - 0.01 <= 0.01)
    for low, high in ((0.0, 0.2), (0.2, 0.5), (0.5, 0.8), (0.8, 1.0)):
        some = [(p, h) for p, h in zip(said, held, strict=True) if low <= p < high]
        expected, seen = np.mean(some, axis=0)
        assert seen == pytest.approx(expected, abs=0.1)
