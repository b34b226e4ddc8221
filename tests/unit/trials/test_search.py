"""Searches on a small model, with a real Optuna."""

from __future__ import annotations

import builtins
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import roundel
from helpers import build, feeds, node, normal
from roundel.errors import DependencyError, OutputError, RecipeError
from roundel.trials.study import Study, Trial

X = {"x": [1, 3, 8, 8]}
DATA = feeds(X, count=8)
SPACE = {"weights.method": ["minmax", "mse"], "weights.per_channel": [True, False]}


def small() -> Any:
    nodes = [
        node("Conv", ["x", "w"], ["c"], name="conv"),
        node("Relu", ["c"], ["r"], name="relu"),
        node("Conv", ["r", "k"], ["y"], name="conv2"),
    ]
    return build(nodes, X, ["y"], {"w": normal(4, 3, 3, 3), "k": normal(4, 4, 1, 1, seed=1)})


def look(study: Path | None = None, trials: int = 4, **options: Any) -> roundel.SearchResult:
    given = {"data": DATA, "space": SPACE, "recipe": "a8w8_minmax", **options}
    return roundel.search(small(), study=study, trials=trials, **given)


def test_every_combination_once_where_that_is_possible(tmp_path: Path) -> None:
    out = tmp_path / "best.onnx"
    found = look(trials=50, output=out)
    assert len(found.trials) == 4
    assert len({tuple(trial.parameters.items()) for trial in found.trials}) == 4
    best = max(found.trials, key=lambda trial: trial.values[0])
    assert found.best[0].values == best.values
    assert found.best[0].parameters["weights.per_channel"] is True
    assert out.exists()
    assert found.result is not None
    assert found.recipe is not None
    assert found.recipe.weights.per_channel
    # The words make the same model again.
    assert found.options.startswith("-p a8w8_minmax -s weights.method=")


def test_a_search_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    seen: list[int] = []

    def stop(trial: Trial) -> None:
        seen.append(trial.number)
        if len(seen) == 2:
            raise KeyboardInterrupt

    study = tmp_path / "s.db"
    with pytest.raises(KeyboardInterrupt):
        look(study, on_trial=stop)
    again: list[int] = []
    found = look(study, on_trial=lambda trial: again.append(trial.number))
    assert len(found.trials) == 4
    assert len(again) == 2
    finished = look(study, on_trial=lambda trial: again.append(trial.number))
    assert len(again) == 2
    assert finished.best == found.best


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
def test_a_search_that_was_killed_goes_on(tmp_path: Path) -> None:
    study = tmp_path / "s.db"
    script = textwrap.dedent(f"""
        import os, signal
        from pathlib import Path
        from roundel.trials.study import Study
        from roundel.trials.study import read_space
        from roundel.types import Silent
        study = Study(Path({str(study)!r}), read_space(["calibration.margin=1.0..2.0"]), ["minimize"])
        def evaluate(parameters, told):
            if len(study.trials) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return (abs(parameters["calibration.margin"] - 1.5),)
        study.run(6, evaluate, Silent(), lambda trial: None)
    """)
    ran = subprocess.run([sys.executable, "-c", script], env=dict(os.environ), check=False)
    assert ran.returncode == -signal.SIGKILL
    from roundel.trials.study import read_space
    from roundel.types import Silent

    again = Study(study, read_space(["calibration.margin=1.0..2.0"]), ["minimize"])
    assert len(again.trials) == 2
    asked: list[float] = []

    def evaluate(parameters: Any, told: object) -> tuple[float, ...]:
        asked.append(parameters["calibration.margin"])
        return (abs(parameters["calibration.margin"] - 1.5),)

    again.run(6, evaluate, Silent(), lambda trial: None)
    assert len(again.trials) == 6
    assert len(asked) == 4
    assert len(set(asked)) == 4
    assert again.best[0].values[0] == min(trial.values[0] for trial in again.trials)


def test_what_cannot_be_combined_is_refused_and_said() -> None:
    space = {"effort": ["none"], "improve.finetune.algorithm": ["none", "adaround"]}
    found = look(space=space)
    refused = [trial for trial in found.trials if trial.reason]
    assert len(refused) == 1
    assert "needs effort" in refused[0].reason
    assert len(found.best) == 1


def test_several_objectives_give_a_front() -> None:
    found = look(space={"preset": ["a8w8_minmax", "bf16"]}, also=["size", "npu"])
    assert found.objectives == ("sqnr", "size", "npu")
    by_preset = {trial.parameters["preset"]: trial.values for trial in found.trials}
    assert by_preset["bf16"][0] > by_preset["a8w8_minmax"][0]
    assert by_preset["bf16"][1] != by_preset["a8w8_minmax"][1]
    assert found.best[0].parameters["preset"] == "bf16"
    assert found.options == "-p bf16"


def test_a_study_of_something_else_is_refused(tmp_path: Path) -> None:
    study = tmp_path / "s.db"
    look(study, trials=1)
    with pytest.raises(RecipeError, match="another search") as caught:
        look(study, recipe="a16w8_minmax")
    assert "recipe" in str(caught.value)
    junk = tmp_path / "junk.db"
    junk.write_text("this is no database, and never was one")
    with pytest.raises(OutputError, match="cannot be used"):
        look(junk)


def test_without_optuna_the_command_to_get_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *rest: Any, **more: Any) -> Any:
        if name == "optuna":
            raise ImportError("No module named 'optuna'")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(DependencyError) as caught:
        look()
    assert "pip install 'roundel[search]'" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"trials": 0}, "at least one trial"),
        ({"sampler": "grid"}, "tpe or random"),
        ({"also": ["sise"]}, "Did you mean 'size'"),
        ({"metric": "sqn"}, "Did you mean 'sqnr'"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        look(**options)
    assert words in str(caught.value)


def with_a_gain() -> Any:
    """Beside the picture it takes a number, which the samples do not hold."""
    nodes = [
        node("Mul", ["x", "gain"], ["m"], name="gained"),
        node("Conv", ["m", "w"], ["y"], name="conv"),
    ]
    return build(nodes, {**X, "gain": [1]}, ["y"], {"w": normal(4, 3, 3, 3)})


@pytest.mark.parametrize("space", [{"weights.method": ["minmax", "mse"]}, {"preset": ["a8w8", "a16w8"]}])
def test_inputs_may_be_fixed(space: dict[str, list[str]]) -> None:
    found = roundel.search(with_a_gain(), data=DATA, space=space, trials=2, fix_inputs={"gain": 0.5})
    assert len(found.trials) == 2
    assert all(trial.values[0] > 20 for trial in found.trials)
    with pytest.raises(roundel.RoundelError, match="gain"):
        roundel.search(with_a_gain(), data=DATA, space=space, trials=2)


def test_auto_takes_fixed_inputs() -> None:
    words: dict[str, Any] = {"data": DATA, "rungs": ["a16w8"], "metric": "fidelity"}
    found = roundel.auto(with_a_gain(), fix_inputs={"gain": 0.5}, **words)
    assert found.met
    assert [value.name for value in found.result.model.graph.input] == ["x"]
    with pytest.raises(roundel.RecipeError, match="no input 'gian'"):
        roundel.auto(with_a_gain(), fix_inputs={"gian": 0.5}, **words)
