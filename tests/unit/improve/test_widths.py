"""Sixteen bits for the few activations that spoil an output; and what is said where one misses its goal."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest

import roundel
from helpers import activations, sqnr
from roundel.plan.stream import stream_tensors
from transformer_models import residual_sum, rows_of_noise

DATA = rows_of_noise()


def wide(result: roundel.QuantizeResult) -> set[str]:
    return {name for name, tensor in result.plan.tensors.items() if tensor.integer.qtype.bits == 16}


def test_the_stream_is_what_norms_read_and_make() -> None:
    graph = ir.from_proto(residual_sum(1.0)).graph
    assert stream_tensors(graph) == {"x", "branch", "sum", "normed"}


def test_outliers_of_a_stream_get_sixteen_bits() -> None:
    model = residual_sum(400.0)
    result = roundel.quantize(model, recipe="a8w8", data=DATA)
    without = roundel.quantize(model, recipe="a8w8", data=DATA, changes={"improve.goal": 0})
    assert "sum" in wide(result)
    assert len(wide(result)) <= 4
    assert not wide(without)
    assert activations(result.model)["sum"].dtype == "int16"
    assert sqnr(model, result, DATA) > sqnr(model, without, DATA) + 6
    assert any("activations are stored in 16 bits ('" in note for note in result.record.notes)
    (step,) = [step for step in result.record.improvements if step.step == "16 bits"]
    assert step.kept


def test_a_network_that_is_well_keeps_eight() -> None:
    result = roundel.quantize(residual_sum(1.0), recipe="a8w8", data=DATA)
    assert not wide(result)
    assert "16 bits" not in {step.step for step in result.record.improvements}
    assert result.record.reached


@pytest.mark.parametrize(("preset", "changes"), [("xint8", {}), ("a8w8", {"effort": "none"})])
def test_pure_eight_bits_stay_pure(preset: str, changes: dict[str, Any]) -> None:
    result = roundel.quantize(residual_sum(400.0), recipe=preset, data=DATA, changes=changes)
    assert not wide(result)
    assert not result.record.reached
    assert result.record.worst is not None
    assert result.record.worst[0] == "y"


def test_a_missed_goal_comes_with_the_command_that_helps() -> None:
    model = residual_sum(400.0)
    result = roundel.quantize(model, recipe="xint8", data=DATA)
    (note,) = [note for note in result.record.notes if "below the goal of 15" in note]
    assert "--preset a16w8" in note
    assert result.record.held_out["y"] < 15
    wider = roundel.quantize(model, recipe="a16w8", data=DATA)
    assert sqnr(model, wider, DATA) > sqnr(model, result, DATA) + 3


def test_the_goal_is_the_users() -> None:
    model = residual_sum(1.0)
    reached = roundel.quantize(model, recipe="a8w8", data=DATA, goal="12 dB").record
    assert reached.goal == 12
    assert reached.reached
    assert not roundel.quantize(model, recipe="a8w8", data=DATA, goal=90).record.reached
    with pytest.raises(roundel.RoundelError, match="decibels"):
        roundel.quantize(model, recipe="a8w8", data=DATA, goal="good")
