"""Spaces in words, files and mappings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roundel.errors import RecipeError
from roundel.recipe.load import unfolded
from roundel.trials.study import Choice, Span, combinations, read_space


def test_words() -> None:
    space = read_space(
        [
            "weights.per_channel=true,false",
            "preset=xint8,a8w8",
            "calibration.margin=1.0..2.5",
            "improve.finetune.iterations=10..1000:log",
        ]
    )
    assert space == {
        "weights.per_channel": Choice.of([True, False]),
        "preset": Choice.of(["xint8", "a8w8"]),
        "calibration.margin": Span(1.0, 2.5),
        "improve.finetune.iterations": Span(10, 1000, log=True),
    }
    assert space["improve.finetune.iterations"].whole
    assert not space["calibration.margin"].whole
    assert combinations(space) is None


def test_a_file_and_words_together(tmp_path: Path) -> None:
    file = tmp_path / "space.yaml"
    file.write_text("weights.method: [minmax, mse]\nimprove.finetune.beta_range: [[20, 2], [10, 2]]\n")
    space = read_space([str(file), "effort=none,fast"])
    assert space["improve.finetune.beta_range"].values == [[20, 2], [10, 2]]
    assert combinations(space) == 8


def test_a_mapping() -> None:
    given = {"calibration.margin": {"low": 1, "high": 4}, "effort": "fast", "mode": "static,dynamic"}
    space = read_space(given)
    assert space == {
        "calibration.margin": Span(1, 4),
        "effort": Choice.of(["fast"]),
        "mode": Choice.of(["static", "dynamic"]),
    }


def test_dotted_names_become_a_tree() -> None:
    assert unfolded({"a.b": 1, "a.c.d": 2, "e": 3}) == {"a": {"b": 1, "c": {"d": 2}}, "e": 3}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (["weights.methd=mse"], "Did you mean 'method'"),
        (["weigths.method=mse"], "Did you mean 'weights'"),
        (["effort.more=1"], "has no fields of its own"),
        (["weights.method=mse,mad"], "does not take one of the values"),
        (["calibration.margin=1..99"], "does not take one of the values"),
        (["preset=a8w9"], "Did you mean 'a8w8'"),
        (["calibration.margin=2..1"], "to a larger one"),
        (["calibration.margin=0..2:log"], "above zero"),
        (["calibration.margin=1..2:lin"], "plain or logarithmic"),
        (["calibration.margin=a..b"], "from one number to another"),
        (["weights.method="], "no values"),
        (["no_such_file.yaml"], "does not exist"),
        ([], "empty"),
        ({"calibration.margin": {"low": 1}}, "two ends"),
    ],
)
def test_what_cannot_be(source: Any, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read_space(source)
    assert words in str(caught.value)
