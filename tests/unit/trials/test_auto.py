"""The ladder as a user walks it, on the embedded example."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import roundel
from roundel.errors import DataError, RecipeError
from roundel.example import load_example
from roundel.measure.evaluate import evaluate_models
from roundel.measure.layers import LayerCost
from roundel.measure.yardstick import Judgement, Measure
from roundel.trials import auto as ladder_walk
from roundel.trials import rungs
from roundel.trials.budget import parse_drop
from roundel.trials.rungs import RUNGS, RungForecast, RungVerdict, grown
from roundel.types import Silent

DIGITS = load_example()
CALM = ["xint8", "a8w8", "a16w8", "mixed", "bf16"]  # no gradients: quick


def walk(output: Path | None = None, **options: Any) -> roundel.AutoResult:
    given = {"data": DIGITS.calibration[:24], "rungs": CALM, **options}
    return roundel.auto(DIGITS.model_path, output, **given)


def verdicts(found: roundel.AutoResult) -> dict[str, str]:
    return {step.rung: step.verdict.value for step in found.steps}


def test_the_first_rung_that_meets_the_budget_wins(tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    found = walk(
        out,
        eval_data=[{"image": x[None]} for x in DIGITS.eval_x[:60]],
        labels=DIGITS.eval_y[:60],
        max_drop="5%",
    )
    assert found.met
    assert found.steps[-1].verdict is RungVerdict.CHOSEN
    assert len(found.steps) < len(CALM)
    assert found.metric == "top1"
    # What the ladder says is what anyone else measures on the file.
    data = [{"image": x[None]} for x in DIGITS.eval_x[:60]]
    plain, quantized = evaluate_models([DIGITS.model_path, out], data, labels=DIGITS.eval_y[:60])
    assert found.reference == plain.top1
    assert found.chosen.metric == quantized.top1
    assert found.chosen.drop == pytest.approx(100 * (plain.top1 - quantized.top1) / plain.top1)
    assert found.chosen.file_bytes == out.stat().st_size
    tree = json.loads(out.with_suffix(".auto.json").read_text())
    assert tree["met"] is True
    assert tree["chosen"] == found.chosen.rung
    record = json.loads(out.with_suffix(".json").read_text())
    assert record["file"] == {
        "name": "out.onnx",
        "bytes": out.stat().st_size,
        "sha256": hashlib.sha256(out.read_bytes()).hexdigest(),
    }
    assert {p.name for p in tmp_path.iterdir()} == {"out.onnx", "out.json", "out.auto.json"}


def test_an_impossible_budget_hands_over_the_best(tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    found = walk(out, data=DIGITS.calibration[:12], metric="fidelity", max_drop="0")
    assert not found.met
    assert out.exists()
    tried = [step for step in found.steps if step.metric is not None]
    assert [s.rung for s in tried] == ["xint8", "a8w8", "a16w8", "bf16"]
    best = max(tried, key=lambda step: step.metric or 0)
    assert best.verdict is RungVerdict.BEST
    assert found.chosen is best
    mixed = next(step for step in found.steps if step.rung == "mixed")
    assert mixed.verdict is RungVerdict.SKIPPED
    assert "A16W8 everywhere" in mixed.reason


def test_a_part_of_a16w8_wins_over_all_of_it() -> None:
    # Between what A8W8 and A16W8 reach there is room for a mixture.
    few = DIGITS.calibration[:24]
    both = walk(data=few, metric="fidelity", max_drop="0", rungs=["a8w8", "a16w8"])
    narrow, wide = (step.drop for step in both.steps)
    assert narrow is not None
    assert wide is not None
    between = f"{0.9 * narrow + 0.1 * wide}"
    found = walk(data=few, metric="fidelity", max_drop=between, rungs=["a8w8", "a16w8", "mixed"])
    assert found.met
    assert found.chosen.rung.startswith("mixed ")
    assert verdicts(found)["a16w8"] == "meets"
    kinds = {str(t.scheme) for t in found.result.plan.tensors.values()}
    assert any("int16" in kind for kind in kinds)
    assert any("int8" in kind for kind in kinds)


def test_without_labels_agreement_with_float_counts() -> None:
    found = walk(max_drop="10%")
    assert found.metric == "agreement"
    assert found.reference == 1.0
    assert found.judged_on == "6 samples of the calibration data, one of 4 held out"
    assert any("steps of 16.67%" in note for note in found.notes)


def test_labels_of_held_out_samples_keep_step(tmp_path: Path) -> None:
    labels = DIGITS.calibration_labels[:40]
    found = walk(data=DIGITS.calibration[:40], labels=labels, rungs=["a16w8"], max_drop="100%")
    held = [i for i in range(40) if i % 4 == 3]
    plain = evaluate_models([DIGITS.model_path], [DIGITS.calibration[i] for i in held], labels=labels[held])[
        0
    ]
    assert found.reference == plain.top1
    assert found.result.record.data["samples_seen"] == 30


def test_a_metric_of_ones_own_that_measures_an_error() -> None:
    calls = []

    def spread(outputs: list[Any], labels: object) -> float:
        calls.append((len(outputs), labels))
        return float(np.mean([np.abs(o).max() for o in outputs]))

    found = walk(metric=spread, lower_is_better=True, rungs=["xint8"], max_drop="1000%")
    assert found.metric == "spread"
    assert found.met
    assert calls == [(6, None), (6, None)]


def test_a_device_takes_some_formats_only() -> None:
    found = walk(device="phx", metric="fidelity", max_drop="0", rungs=["xint8", "a8w8", "bf16"])
    assert verdicts(found) == {"xint8": "best", "a8w8": "skipped", "bf16": "skipped"}
    assert found.steps[1].reason == "phx takes XINT8 only"


def test_fine_tuning_has_to_be_asked_for_and_to_have_a_chance() -> None:
    rungs = ["xint8", "a16w8", "xint8-adaround"]
    lost = walk(metric="fidelity", max_drop="0", rungs=["xint8"]).steps[0].drop
    assert lost is not None
    hopeless = walk(metric="fidelity", max_drop=f"{0.4 * lost}", rungs=rungs)
    assert verdicts(hopeless) == {"xint8": "fails", "a16w8": "chosen", "xint8-adaround": "skipped"}
    assert "too much for fine-tuning" in hopeless.steps[-1].reason
    unasked = walk(metric="fidelity", max_drop=f"{0.9 * lost}", rungs=None)
    reasons = {step.rung: step.reason for step in unasked.steps if step.rung.startswith("xint8-")}
    assert set(reasons) == {"xint8-adaround", "xint8-adaquant"}
    assert "--time 20m" in reasons["xint8-adaround"]
    assert unasked.met


def test_fine_tuning_is_tried_where_xint8_came_close() -> None:
    pytest.importorskip("torch")
    lost = walk(metric="fidelity", max_drop="0", rungs=["xint8"]).steps[0].drop
    changes = {"improve": {"finetune": {"iterations": 20}}}
    rungs = ["xint8", "a16w8", "xint8-adaround"]
    found = walk(metric="fidelity", max_drop=f"{0.9 * (lost or 0)}", rungs=rungs, changes=changes)
    tuned = found.steps[-1]
    assert tuned.rung == "xint8-adaround"
    assert tuned.metric is not None
    # Where it meets the budget, XINT8 runs faster than what met it before.
    assert found.chosen is (tuned if tuned.verdict is RungVerdict.CHOSEN else found.steps[1])


def test_what_a_rung_takes_and_how_sure_its_drop_is_are_told() -> None:
    labels = DIGITS.eval_y[:60]
    found = walk(eval_data=[{"image": x[None]} for x in DIGITS.eval_x[:60]], labels=labels, rungs=["xint8"])
    step = found.steps[0]
    assert step.margin is not None
    assert step.margin > 0
    assert step.forecast is not None
    assert step.forecast > 0
    assert walk(metric="fidelity", rungs=["xint8"], max_drop="50%").steps[0].margin is None


@dataclass(frozen=True)
class _Made:
    path: Path | None = None


def _walked(figures: dict[str, tuple[float, float | None]], max_drop: str = "1 point") -> roundel.AutoResult:
    """The ladder with models of these accuracies and margins."""
    made: list[str] = []
    measure = Measure("top1", "share")

    def make(path: object, preset: str, told: object, **rest: object) -> _Made:
        made.append(preset)
        return _Made()

    def judge(told: object) -> Judgement:
        value, margin = figures[made[-1]]
        return Judgement(value, 20.0, 0.0, margin)

    yardstick = SimpleNamespace(
        measure=measure, reference=Judgement(0.9, None, 0.1), samples=400, rows=400, resolution=1 / 400
    )
    engine: Any = SimpleNamespace(
        make=make,
        judge=judge,
        yardstick=yardstick,
        path=Path("t.onnx"),
        folder=Path("t"),
        learn=SimpleNamespace(count=10, description={}),
        judged_on="400 rows",
        npu_share=lambda: 1.0,
        file_bytes=lambda: 1,
    )
    walk = ladder_walk._Walk(engine, parse_drop(max_drop), {}, 0.0, None, Silent(), None, False)
    walk.up([rung for rung in RUNGS if rung.name in figures], {})
    return walk.finished(None)


@pytest.mark.parametrize(
    ("figures", "chosen", "met", "tried"),
    [
        # All of the interval is within the budget: no more is tried.
        ({"xint8": (0.90, 0.007), "a8w8": (0.90, 0.007)}, "xint8", True, 1),
        # Likely enough: 86 % of the truths that look like this are within it.
        ({"xint8": (0.899, 0.016), "a8w8": (0.90, 0.016)}, "xint8", True, 1),
        # Within it by a hair: another rung is worth a look, and one that is sure wins.
        ({"xint8": (0.8905, 0.016), "a8w8": (0.90, 0.007)}, "a8w8", True, 2),
        # Nothing is likely. A little better is not worth a slower format, much better is.
        ({"xint8": (0.8905, 0.016), "a8w8": (0.8906, 0.016)}, "xint8", True, 2),
        ({"xint8": (0.88, 0.016), "a8w8": (0.889, 0.016)}, "a8w8", False, 2),
        # Beyond it with all of the interval.
        ({"xint8": (0.80, 0.016), "a8w8": (0.82, 0.016)}, "a8w8", False, 2),
    ],
)
def test_what_is_chosen_in_doubt(
    figures: dict[str, tuple[float, float | None]], chosen: str, met: bool, tried: int
) -> None:
    found = _walked(figures)
    assert (found.chosen.rung, found.met, len(found.steps)) == (chosen, met, tried)


def test_doubt_says_how_much_more_data_would_tell() -> None:
    found = _walked({"xint8": (0.885, 0.016)})
    assert found.chosen.probability == pytest.approx(0.27, abs=0.01)
    assert found.rows_to_tell == pytest.approx(400 * 3.2**2, abs=1)
    assert found.to_dict()["probability"] == found.chosen.probability
    assert _walked({"xint8": (0.8899, 0.016)}).rows_to_tell is None  # nobody has so many
    assert _walked({"xint8": (0.80, 0.016)}).rows_to_tell is None  # they tell


def test_without_torch_the_gradient_rungs_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    hidden = lambda name, *rest: None if name == "torch" else real(name, *rest)  # noqa: E731
    monkeypatch.setattr(rungs.importlib.util, "find_spec", hidden)
    reasons = rungs.out_of_reach(RUNGS, None)
    assert set(reasons) == {"xint8-adaround", "xint8-adaquant"}
    assert "pip install 'roundel[torch]'" in reasons["xint8-adaround"]


def test_time_is_a_budget() -> None:
    found = walk(metric="fidelity", max_drop="0", time=0.01)
    assert verdicts(found)["xint8"] == "best"
    assert all(step.verdict is RungVerdict.SKIPPED for step in found.steps[1:])
    assert all("time is over" in step.reason for step in found.steps[1:])


def test_a_rung_that_takes_longer_than_there_is_time_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder_walk, "_too_long", lambda *anything: None)
    found = walk(metric="fidelity", max_drop="0", time=0.01, rungs=["xint8", "a16w8", "bf16"])
    assert verdicts(found) == {"xint8": "best", "a16w8": "stopped", "bf16": "stopped"}
    assert found.steps[1].reason == "time was over before it was done"


def test_a_forecast_learns_from_what_was_seen() -> None:
    forecast = RungForecast(forward=1.0, judging=2.0)
    plain, fast, tuned = (next(r for r in RUNGS if r.name == n) for n in ("bf16", "xint8", "xint8-adaround"))
    first = forecast.seconds(fast)
    forecast.learn(plain, 2 * forecast.seconds(plain))
    assert forecast.seconds(fast) == pytest.approx(2 * first)
    assert forecast.seconds(tuned) > forecast.seconds(fast)


def test_a_rung_must_fit_into_what_is_left_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder_walk.clock, "perf_counter", lambda: 1000.0)
    assert ladder_walk._too_long(125, None) is None
    assert ladder_walk._too_long(125, 1130.0) is None
    assert ladder_walk._too_long(125, 1100.0) == "would take about 125 s, 100 s are left"
    assert ladder_walk._too_long(125, 1000.0) == "time is over"


def test_statistics_are_collected_once_for_a_family() -> None:
    found = walk(metric="fidelity", max_drop="0", rungs=["a8w8", "a16w8"])
    assert "reused the statistics in float.stats" in found.result.record.notes


def test_data_that_can_be_read_once_is_enough() -> None:
    found = walk(data=iter(DIGITS.calibration[:8]), rungs=["xint8", "a16w8"], metric="fidelity", max_drop="0")
    assert len([step for step in found.steps if step.metric is not None]) == 2


def test_growing_mixtures_follow_the_costs() -> None:
    costs = {"a": 60.0, "b": 25.0, "c": 12.0, "d": 3.0, "e": 0.0}
    layers = [LayerCost(name, "Conv", (name, f"{name}_relu"), cost, 1.0, 0.0) for name, cost in costs.items()]
    found = list(grown(layers[::-1], {"effort": "none"}))
    assert [(m.layers, m.of) for m in found] == [(1, 5), (2, 5), (3, 5), (4, 5)]
    assert found[1].changes == {
        "effort": "none",
        "overrides": [{"nodes": ["a", "a_relu", "b", "b_relu"], "type": "int16"}],
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metric": "agrement"}, "Did you mean 'agreement'"),
        ({"metric": "top1"}, "needs labels"),
        ({"metric": "sqnr"}, "fidelity"),
        ({"rungs": ["a8w9"]}, "Did you mean 'a8w8'"),
        ({"rungs": []}, "No rung"),
        ({"device": "stxx"}, "Did you mean 'stx'"),
        ({"max_drop": "a bit"}, "1 point"),
        ({"metric": "fidelity", "lower_is_better": True}, "More is better"),
        ({"changes": {"weights": {"typ": "int8"}}}, "Did you mean 'type'"),
        ({"device": "phx", "rungs": ["bf16"]}, "No rung of the ladder could be tried"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        walk(tmp_path / "out.onnx", **options)
    assert words in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_one_sample_cannot_teach_and_judge() -> None:
    with pytest.raises(DataError, match="One sample"):
        walk(data=DIGITS.calibration[:1])
