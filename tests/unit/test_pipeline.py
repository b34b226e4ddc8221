"""One run, step by step: what it costs, in which order things happen, and how a step is added."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import roundel
from finetune_cases import conv_net, pictures
from roundel import pipeline, stages
from roundel.improve.steps import GRAPH_STEPS, PLAN_STEPS, STATE_STEPS, Step
from roundel.state import Context, State

# Where the work of a run is done: every module that has the function by name is watched.
_WORK = {
    "plans": "build_plan",
    "collections": "observe",
    "written graphs": "write_qdq",
    "sessions": "open_session",
}


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Counter[str]]:
    """Counts plans, collections, written graphs and sessions; collections by their number of samples, too."""
    counts: Counter[str] = Counter()

    def counted(what: str, true: Callable[..., Any]) -> Callable[..., Any]:
        def spy(*arguments: Any, **options: Any) -> Any:
            found = true(*arguments, **options)
            counts[what] += 1
            if what == "collections":
                counts[f"samples in collection {counts[what]}"] = found.samples_seen
            return found

        return spy

    for what, name in _WORK.items():
        for module in list(sys.modules.values()):
            if module.__name__.startswith("roundel.") and callable(getattr(module, name, None)):
                monkeypatch.setattr(module, name, counted(what, getattr(module, name)))
    return lambda: counts


def test_the_data_runs_once(trace: Callable[[], Counter[str]]) -> None:
    """Default effort in XINT8: one pass over all samples, one more plan for each model that is tried."""
    data = pictures(80)
    changes = {"improve": {"samples": 20}, "verify": {"samples": 4}}
    result = roundel.quantize(conv_net(), recipe="xint8", data=data, changes=changes)
    counts = trace()
    collections = [n for name, n in counts.items() if name.startswith("samples in")]
    assert collections.count(80) == 1, "one collection over all of the data"
    assert all(seen <= 20 for seen in collections if seen != 80), "trials see the few samples only"
    steps = {step.step for step in result.record.improvements}
    assert steps == {"equalization", "rounding"}, "ranges found nothing to try on the whole model"
    # Two trial calibrations of the float graph (with and without equalization), and the run's own.
    assert counts["plans"] == len(collections) == 3
    # One for each model that equalization compares; rounding before, its own, after; the file.
    assert counts["written graphs"] == 6
    assert counts["sessions"] == 18, "one of them where the written model's split is predicted"


def test_without_effort_nothing_is_tried(trace: Callable[[], Counter[str]]) -> None:
    result = roundel.quantize(conv_net(), recipe="xint8_plain", data=pictures(6))
    counts = trace()
    assert (counts["plans"], counts["collections"], counts["written graphs"]) == (1, 1, 1)
    assert result.record.improvements == ()


def test_time_is_booked_under_the_step_that_took_it() -> None:
    result = roundel.quantize(conv_net(), recipe="xint8", data=pictures(24))
    seconds = result.record.seconds
    tried = {step.step: step.seconds for step in result.record.improvements}
    assert {"prepare", "plan", "collect", "resolve", "write", "gate"} <= seconds.keys()
    assert {name: seconds[name] for name in tried} == pytest.approx(tried, abs=0.05)
    assert seconds["write"] < seconds["rounding"]


@pytest.mark.parametrize("kept", [True, False])
def test_a_new_algorithm_is_one_entry_in_a_list(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    """What CONTRIBUTING.md says of new steps."""
    before = roundel.quantize(conv_net(), recipe="xint8_plain", data=pictures(24))

    def doubled(state: State, context: Context) -> State:
        name = next(name for name in state.params if name.startswith("w1"))
        old = state.params[name]
        return replace(state, params={**state.params, name: replace(old, scale=old.scale * 2)})

    judge = iter((1.0, 2.0 if kept else 0.5))
    step = Step("doubling", lambda state: True, doubled, lambda state: [next(judge)])
    monkeypatch.setattr(pipeline, "STATE_STEPS", (step,))
    after = roundel.quantize(conv_net(), recipe="xint8_plain", data=pictures(24))
    (report,) = after.record.improvements
    assert (report.step, report.kept, report.before_db) == ("doubling", kept, 1.0)
    same = after.model.SerializeToString() == before.model.SerializeToString()
    assert same is not kept
    assert "doubling" in after.record.seconds


def test_every_step_has_a_name_of_its_own() -> None:
    names = [step.name for step in (*GRAPH_STEPS, *PLAN_STEPS, *STATE_STEPS)]
    assert len(names) == len(set(names))


def test_a_stage_takes_a_state_and_returns_the_next() -> None:
    recipe = roundel.load_recipe("a8w8_minmax")
    prepared = stages.prepare(conv_net(), recipe)
    planned = stages.plan(prepared)
    seen = stages.collect(planned, pictures(4))
    resolved = stages.resolve(seen)
    written = stages.write(resolved)
    assert not prepared.plan.tensors
    assert planned.plan.tensors
    assert not planned.stats
    assert seen.stats.keys() <= set(planned.plan.tensors)
    assert not seen.params
    assert resolved.params
    assert resolved.written is None
    assert written.written is not None
