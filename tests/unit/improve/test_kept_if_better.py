"""No step makes a model worse: what a held-out error does not confirm is undone, and the record says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import roundel
from finetune_cases import conv_net, pictures
from helpers import build, node, normal
from roundel.improve import judges, steps
from roundel.improve.equalize import EqualizeReport
from roundel.state import State, StepReport
from roundel.types import QType, Sample

PLAIN: dict[str, Any] = {"improve": {"equalize": {"enabled": False}, "ranges": False, "rounding": False}}
EVENING: dict[str, Any] = {"improve": {**PLAIN["improve"], "equalize": {"enabled": True}}}
RANGES: dict[str, Any] = {"improve": {**PLAIN["improve"], "ranges": True}}
ROUNDING: dict[str, Any] = {"improve": {**PLAIN["improve"], "rounding": True}}
TUNING: dict[str, Any] = {
    "improve": {**PLAIN["improve"], "finetune": {"algorithm": "adaround", "iterations": 40}}
}


def quantized(
    model: onnx.ModelProto, data: Any, changes: dict[str, Any], folder: Path, name: str
) -> tuple[bytes, roundel.QuantizeResult]:
    path = folder / f"{name}.onnx"
    result = roundel.quantize(model, path, recipe="xint8", data=data, changes=changes)
    return path.read_bytes(), result


def only_step(result: roundel.QuantizeResult, name: str) -> StepReport:
    (step,) = result.record.improvements
    assert step.step == name
    return step


def assert_refused(step: StepReport) -> None:
    assert not step.kept
    assert step.refused_db is not None
    assert step.refused_db <= step.before_db
    assert step.after_db == step.before_db


def faint(count: int = 30, strength: float = 0.01) -> list[Sample]:
    """Images with hardly any contrast; those of the last fifth, which judges, have all of theirs."""
    samples = pictures(count)
    for sample in samples[: count - round(count * 0.2)]:
        sample["x"] *= strength
    return samples


def harmful(model: ir.Model, options: object, *, power_of_two: bool) -> EqualizeReport:
    """Exact in float, and the opposite of equalization: one channel a thousand times the others."""
    for name, factor in (("w1", 1000.0), ("b1", 1000.0), ("w2", 0.001)):
        value = model.graph.initializers[name]
        assert value.const_value is not None
        array = value.const_value.numpy().copy()
        array[0] *= factor
        value.const_value = ir.tensor(array, name=name)
    return EqualizeReport(1, 1, 0, 0, 1, ("conv1",))


def test_equalization_that_hurts_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = conv_net(), pictures(24)
    before, _ = quantized(model, data, PLAIN, tmp_path, "before")
    monkeypatch.setattr(steps, "equalize", harmful)
    after, result = quantized(model, data, EVENING, tmp_path, "after")
    assert after == before
    assert_refused(only_step(result, "equalization"))
    assert "equalize" not in result.record.prepare


def uneven_net() -> onnx.ModelProto:
    """Every other channel 40 times as large, through a Relu: the float model stays as it is."""
    model = conv_net()
    weights = {w.name: w for w in model.graph.initializer}
    for name, factor in (("w1", 40.0), ("b1", 40.0), ("w2", 1 / 40)):
        array = onnx.numpy_helper.to_array(weights[name]).copy()
        array[::2] *= factor
        weights[name].CopyFrom(onnx.numpy_helper.from_array(array, name))
    return model


def test_equalization_that_helps_is_kept(tmp_path: Path) -> None:
    model = uneven_net()
    before, _ = quantized(model, pictures(24), PLAIN, tmp_path, "before")
    after, result = quantized(model, pictures(24), EVENING, tmp_path, "after")
    step = only_step(result, "equalization")
    assert step.kept
    assert step.after_db > step.before_db + 3
    assert after != before
    assert result.record.prepare["equalize"] > 0


@pytest.mark.parametrize("once", [False, True])
def test_a_refused_equalization_costs_no_second_pass_over_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, once: bool
) -> None:
    few: dict[str, Any] = {"improve": {**EVENING["improve"], "samples": 8}, "verify": {"samples": 4}}
    model, data = conv_net(), pictures(40)
    data[-1]["x"] *= 20  # only a run that sees the last sample knows this range
    plain: dict[str, Any] = {"improve": {**PLAIN["improve"], "samples": 8}, "verify": {"samples": 4}}
    before, _ = quantized(model, data, plain, tmp_path, "before")
    monkeypatch.setattr(steps, "equalize", harmful)
    after, result = quantized(model, iter(data) if once else data, few, tmp_path, "after")
    assert_refused(only_step(result, "equalization"))
    assert after == before
    assert result.record.data["samples_seen"] == 40


def test_with_too_few_samples_to_judge_nothing_is_tried(tmp_path: Path) -> None:
    before, _ = quantized(conv_net(), pictures(3), PLAIN, tmp_path, "before")
    after, result = quantized(conv_net(), pictures(3), {}, tmp_path, "after")
    assert after == before
    assert result.record.improvements == ()
    assert any("needs 4 samples" in note for note in result.record.notes)


@pytest.mark.parametrize("count", [0, 2])
def test_what_is_left_out_for_want_of_samples_is_said_as_it_is(count: int) -> None:
    data = pictures(count) if count else None
    (note,) = roundel.quantize(conv_net(), preset="bf16", data=data).record.notes
    assert "calibration" not in note
    assert f"needs 4 samples for it and had {count or 'none'}" in note
    bare = build([node("MatMul", ["x", "w"], ["y"], name="m")], {"x": [1, 8]}, ["y"], {"w": normal(8, 4)})
    assert roundel.quantize(bare, preset="bf16").record.notes == ()  # nothing could be won back


@pytest.mark.parametrize("strength", [0.0, 0.01, 3.0])
def test_rounding_for_other_inputs_than_those_that_judge_is_safe(tmp_path: Path, strength: float) -> None:
    before, _ = quantized(conv_net(), faint(strength=strength), PLAIN, tmp_path, "before")
    after, result = quantized(conv_net(), faint(strength=strength), ROUNDING, tmp_path, "after")
    step = only_step(result, "rounding")
    assert all(layer.after_db == layer.before_db for layer in step.layers if not layer.kept)
    if step.kept:
        assert step.after_db > step.before_db
    else:
        assert_refused(step)
        assert after == before


def test_fine_tuning_for_other_inputs_than_those_that_judge_is_undone(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    before, _ = quantized(conv_net(), faint(), PLAIN, tmp_path, "before")
    after, result = quantized(conv_net(), faint(), TUNING, tmp_path, "after")
    step = only_step(result, "fine-tuning")
    assert_refused(step)
    # Samples that watch say when to stop, so that single layers may gain; the whole model does not.
    assert all((layer.after_db > layer.before_db) is layer.kept for layer in step.layers)
    assert after == before


def _damaged(state: State) -> State:
    """Each step believes in its own work; this one is wrong about the first layer."""
    codes = np.full((8, 3, 3, 3), 77, np.int8)
    return replace(state, codes={**state.codes, "w1": codes})


@pytest.mark.parametrize(
    ("step", "work", "changes"),
    [
        ("ranges", "choose_ranges", RANGES),
        ("rounding", "choose_rounding", ROUNDING),
        ("fine-tuning", "finetune", TUNING),
    ],
)
def test_a_step_that_damages_the_model_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, work: str, changes: dict[str, Any]
) -> None:
    def wrong(work: Callable[..., Any]) -> Callable[..., Any]:
        def done(*arguments: Any, **more: Any) -> tuple[State, Sequence[object]]:
            state, reports = work(*arguments, **more)
            return _damaged(state), reports

        return done

    if step == "fine-tuning":
        pytest.importorskip("torch")
    monkeypatch.setattr(steps, work, wrong(getattr(steps, work)))
    before, _ = quantized(conv_net(), pictures(24), PLAIN, tmp_path, "before")
    after, result = quantized(conv_net(), pictures(24), changes, tmp_path, "after")
    assert after == before
    report = only_step(result, step)
    assert_refused(report)
    stored = (tmp_path / "after.json").read_text()
    assert '"kept": false' in stored
    assert '"refused_db"' in stored


def test_fine_tuning_falls_back_on_the_rounding_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    before, rounded = quantized(conv_net(), pictures(40), ROUNDING, tmp_path, "before")
    work = steps.finetune

    def wrong(*arguments: Any, **more: Any) -> tuple[State, Sequence[object]]:
        state, reports = work(*arguments, **more)
        return _damaged(state), reports

    monkeypatch.setattr(steps, "finetune", wrong)
    both: dict[str, Any] = {"improve": {**ROUNDING["improve"], "finetune": TUNING["improve"]["finetune"]}}
    after, result = quantized(conv_net(), pictures(40), both, tmp_path, "after")
    assert after == before
    one, other = result.record.improvements
    assert one.kept
    assert_refused(other)
    assert other.before_db == one.after_db == rounded.record.improvements[0].after_db


def test_steps_before_rounding_are_judged_by_what_rounding_will_leave(tmp_path: Path) -> None:
    both: dict[str, Any] = {"improve": {"equalize": {"enabled": False}, "ranges": True, "rounding": True}}
    _, ahead = quantized(uneven_net(), pictures(24), both, tmp_path, "both")
    _, alone = quantized(uneven_net(), pictures(24), RANGES, tmp_path, "alone")
    ranges, rounding, back = ahead.record.improvements
    plain = only_step(alone, "ranges")
    assert (ranges.foreseen, rounding.foreseen, plain.foreseen) == (True, False, False)
    assert (back.step, back.kept) == ("calibration alone", False)
    assert ranges.before_db > plain.before_db + 3  # finer weights
    assert rounding.before_db < ranges.after_db - 3  # and rounding starts from those that are there


def test_foreseen_weights_are_finer_but_chosen_codes_stay(tmp_path: Path) -> None:
    captured: list[State] = []
    work = steps.choose_rounding

    def seen(model: ir.Model, state: State, *rest: Any, **more: Any) -> Any:
        captured.append(state)
        ahead = judges.as_if_rounded(model.graph, state)
        moved = {n for n in state.params if not state.params[n].same_as(ahead.params[n])}
        assert {"w1", "w2"} <= moved <= set(model.graph.initializers)
        for name in moved:
            assert ahead.params[name].qtype is QType.INT16
            assert float(ahead.params[name].scale) * 8 == float(state.params[name].scale)
        codes = np.zeros((8, 3, 3, 3), np.int8)
        given = judges.as_if_rounded(model.graph, replace(state, codes={"w1": codes}))
        assert given.params["w1"].same_as(state.params["w1"])
        return work(model, state, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "choose_rounding", seen)
        quantized(conv_net(), pictures(24), ROUNDING, tmp_path, "seen")
    assert captured


@pytest.mark.parametrize(
    ("draws", "asked", "kept"),
    [
        pytest.param([(-5.2, 0.7), (8.4, 4.8), (2.6, 0.4)], 3, False, id="one draw was lucky"),
        pytest.param([(10.0, 12.0), (11.0, 13.0), (12.0, 0.0)], 2, True, id="two leave no doubt"),
        pytest.param([(10.0, 10.4), (11.0, 11.5), (12.0, 12.4)], 3, True, id="small, and the same in all"),
        pytest.param([(10.0, 11.0), (11.0, 10.5), (12.0, 11.6)], 3, False, id="no more than chance shows"),
    ],
)
def test_draws_that_disagree_keep_nothing(draws: list[tuple[float, float]], asked: int, kept: bool) -> None:
    before, after = (SimpleNamespace(side=side) for side in (0, 1))
    seen: list[float] = []

    def judge(state: Any) -> Iterator[float]:
        for draw in draws:
            seen.append(draw[state.side])
            yield draw[state.side]

    with ThreadPoolExecutor(2) as pool:
        errors, doubt = steps._compared(judge(before), judge(after), pool)
    assert len(seen) == 2 * asked
    assert steps.verdict("step", errors, 0.0, doubt=doubt).kept is kept
