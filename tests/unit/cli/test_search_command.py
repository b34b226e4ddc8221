"""`roundel search` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from roundel.recipe.load import load_recipe

WORDS = ("-p", "a8w8_minmax", "--space", "weights.per_channel=true,false")


def test_the_best_trial_its_recipe_and_its_model(
    roundel_cli: Any, digits: Path, arrays: Path, tmp_path: Path
) -> None:
    study, out, best = tmp_path / "s.db", tmp_path / "best.onnx", tmp_path / "best.yaml"
    files = ("--study", study, "-o", out, "--save-recipe", best)
    ran = roundel_cli("search", digits, "--data", arrays, *WORDS, *files)
    assert ran.code == 0
    assert "2 of 20 trials, sqnr" in ran.out
    assert "the best one again" in ran.out
    assert "trial 0: " in ran.err
    assert out.exists()
    again = roundel_cli("search", digits, "--data", arrays, *WORDS, "--study", study, "--json")
    tree = json.loads(again.out)
    assert tree["finished"] == 2
    assert load_recipe(best).weights.per_channel is tree["best"][0]["parameters"]["weights.per_channel"]


def test_a_misspelt_field(roundel_cli: Any, digits: Path, arrays: Path) -> None:
    ran = roundel_cli("search", digits, "--data", arrays, "--space", "weights.per_chanel=true")
    assert ran.code == 2
    assert "Did you mean 'per_channel'" in ran.err


def test_the_help_shows_examples(roundel_cli: Any) -> None:
    assert "killed? run it again" in " ".join(roundel_cli("search", "--help").out.split())
