"""Layers that take a second type because the data says so."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import roundel
from helpers import activations, build, feeds, node, normal, weights
from roundel.errors import RecipeError, SelectionError
from roundel.numerics.metrics import DISTANCES

X = {"x": [1, 4, 8, 8]}
DATA = feeds(X, count=6)


def three() -> Any:
    """Three layers; the input of the middle one has an outlier channel, so that eight bits hurt it most."""
    spiky = normal(4, 4, 1, 1, seed=1)
    spiky[0] *= 60
    nodes = [
        node("Conv", ["x", "a"], ["p"], name="first"),
        node("Conv", ["p", "b"], ["q"], name="middle"),
        node("Conv", ["q", "c"], ["y"], name="last"),
    ]
    calm = normal(4, 4, 1, 1, seed=2)
    calm[:, 0] /= 60
    return build(nodes, X, ["y"], {"a": spiky, "b": calm, "c": normal(4, 4, 1, 1, seed=3)})


def mixed(recipe: str = "a8w8_minmax", **options: Any) -> Any:
    changes = {"mixed": options, "weights": {"per_channel": True}}
    return roundel.quantize(three(), recipe=recipe, data=DATA, changes=changes)


def story(result: Any) -> tuple[int, float, float]:
    """How many layers were mixed, and the error before and after."""
    note = next(note for note in result.record.notes if note.startswith("mixed precision"))
    found = re.search(r"(\d+) of 3 layers in \w+: \w+ (\S+)(?: dB)? -> \w+ (\S+)", note)
    assert found is not None, note
    return int(found[1]), float(found[2]), float(found[3].rstrip(","))


def wide(result: Any) -> set[str]:
    return {name for name, stored in activations(result.model).items() if stored.dtype == "int16"}


def test_quality_widens_the_layers_that_gain_most_and_no_more() -> None:
    plain = mixed(type="int16", weights="int8", threshold=1e9, goal="quality")
    assert story(plain)[0] == 0
    assert wide(plain) == set()
    start = story(plain)[1]
    count, before, after = story(
        result := mixed(type="int16", weights="int8", threshold=0.7 * start, goal="quality")
    )
    assert before == start
    assert count == 1
    assert after <= 0.7 * start
    assert wide(result) == {"p"}
    assert {stored.dtype for stored in weights(result.model).values()} == {"int8"}


def test_speed_narrows_as_long_as_the_error_stays_within() -> None:
    whole = story(mixed("a16w8_minmax", type="int8", threshold=1e9))
    assert whole[0] == 3
    some = mixed("a16w8_minmax", type="int8", threshold=0.7 * whole[2])
    count, before, after = story(some)
    assert 0 < count < 3
    assert before < after <= 0.7 * whole[2]
    assert "p" in wide(some), "the outlier keeps its sixteen bits"
    none = mixed("a16w8_minmax", type="int8", threshold=0.5 * before)
    assert story(none)[0] == 0


def test_a_limit_in_decibels_is_a_signal_to_noise_ratio() -> None:
    start = story(mixed(type="int16", threshold=0, goal="quality", metric="sqnr"))[1]
    better = mixed(type="int16", threshold=start + 3, goal="quality", metric="sqnr")
    count, before, after = story(better)
    assert before == start
    assert after >= start + 3
    assert count >= 1
    assert "within sqnr" in " ".join(better.record.notes)


def test_what_cannot_be_reached_is_said() -> None:
    result = mixed(type="int16", threshold=999, goal="quality", metric="sqnr")
    assert story(result)[0] == 3
    assert any("not within sqnr 999 dB" in note for note in result.record.notes)


def test_the_candidates_can_be_named() -> None:
    result = mixed(type="int16", include=["last", "middle"], exclude=["middle"])
    assert wide(result) == {"q"}
    with pytest.raises(SelectionError, match="No node"):
        mixed(type="int16", include=["lst"])


def test_short_floats_mix_as_well() -> None:
    result = roundel.quantize(
        three(),
        recipe="bf16",
        data=DATA,
        changes={"mixed": {"type": "bfp16", "threshold": 30, "metric": "sqnr"}, "effort": "none"},
    )
    assert story(result)[2] >= 30


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threshold": 1.0}, "mixed.threshold means mixed.type"),
        ({"type": "int16", "goal": "quality"}, "mixed.goal means mixed.threshold"),
        ({"type": "int16", "threshold": 1.0, "output": 4}, "no such output"),
        ({"type": "int16", "threshold": 1.0, "metric": "l3"}, "l2"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        mixed(**options)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", DISTANCES)
def test_distances_grow_with_the_error(name: str) -> None:
    reference, noise = normal(3, 50), normal(3, 50, seed=1)
    errors = [DISTANCES[name](reference, reference + scale * noise) for scale in (0.0, 0.01, 0.1, 1.0)]
    assert errors == sorted(errors)
    assert len(set(errors)) == 4


def test_distances_as_they_are_defined() -> None:
    a, b = np.array([3.0, 4.0]), np.array([3.0, 3.0])
    assert DISTANCES["l2"](a, b) == pytest.approx(1.0)
    assert DISTANCES["cosine"](a, 2 * a) == pytest.approx(0.0)
    assert DISTANCES["sqnr"](a, b) == pytest.approx(-10 * np.log10(25))
    assert DISTANCES["psnr"](a, b) == pytest.approx(10 * np.log10(0.5) - 20 * np.log10(4))
    p, q = a / 7, b / 6
    assert DISTANCES["kl"](a, b) == pytest.approx(float(np.sum(p * np.log(p / q))))
