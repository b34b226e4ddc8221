"""Rotation and smoothing as a user asks for them: judged, told, and dropped where they do not help."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import roundel
from helpers import build, feeds, node, sqnr
from roundel.improve import smooth
from roundel.improve.smooth import SmoothChoice
from roundel.types import Sample
from transformer_models import tokens, transformer

PRESET = "int8_transformer_default"
SMOOTH = {"improve": {"smooth": {"enabled": True}}}
ROTATE = {"improve": {"rotate": {"enabled": True}}}


def quantized(changes: dict[str, Any], data: Any = None, **options: Any) -> roundel.QuantizeResult:
    model = options.pop("model", None) or transformer(blocks=1)
    return roundel.quantize(model, recipe=PRESET, data=data or tokens(20), changes=changes, **options)


@pytest.mark.parametrize(("name", "changes"), [("smoothing", SMOOTH), ("rotation", ROTATE)])
def test_a_step_that_helps_is_kept_and_told(name: str, changes: dict[str, Any]) -> None:
    model, fresh = transformer(blocks=1, spiky=name == "smoothing"), tokens(60)[40:]
    plain, better = quantized({}, model=model), quantized(changes, model=model)
    (step,) = better.record.improvements
    assert (step.step, step.kept) == (name, True)
    assert step.after_db > step.before_db + 1
    assert sqnr(model, better, fresh) > sqnr(model, plain, fresh) + 1
    assert any(note.startswith(f"{name}: ") for note in better.record.notes)


def test_smoothing_tells_of_each_layer() -> None:
    (step,) = quantized(SMOOTH).record.improvements
    assert {layer.op for layer in step.layers} == {"MatMul"}
    assert all(layer.after_db > layer.before_db for layer in step.layers if layer.kept)


def test_rotation_comes_first_and_both_count() -> None:
    both = quantized({"improve": {**SMOOTH["improve"], **ROTATE["improve"]}})
    assert [step.step for step in both.record.improvements] == ["rotation", "smoothing"]
    first, second = both.record.improvements
    assert second.before_db == first.after_db


def test_a_step_that_hurts_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = quantized({})

    def worst(group: Any, *rest: Any) -> SmoothChoice:
        factors = np.exp2(np.linspace(-9, 9, group.channels))
        zeros = (0.0,) * len(group.layers)
        return SmoothChoice(0.5, factors, zeros, zeros)

    monkeypatch.setattr(smooth, "choose_factors", worst)
    result = quantized(SMOOTH)
    (step,) = result.record.improvements
    assert not step.kept
    assert step.refused_db is not None
    assert step.refused_db < step.before_db == step.after_db
    assert result.model.SerializeToString() == plain.model.SerializeToString()


def test_a_rotation_that_hurts_is_dropped() -> None:
    # Without outliers, one scale for a row that was even is worse behind a rotation than before.
    model = transformer(blocks=1)
    for tensor in model.graph.initializer:
        if tensor.name == "table":
            array = np.sign(np.frombuffer(tensor.raw_data, np.float32)).astype(np.float32)
            tensor.raw_data = array.tobytes()
    result = quantized(ROTATE, model=model)
    (step,) = result.record.improvements
    assert step.kept == (step.refused_db is None)
    assert step.after_db >= step.before_db


def test_what_does_not_fit_is_told() -> None:
    result = quantized(ROTATE, model=transformer(post=True))
    assert result.record.improvements == ()
    (note,) = [n for n in result.record.notes if n.startswith("rotation: ")]
    assert "as in a post-norm network" in note
    assert "more likewise" in note


def test_a_network_without_layers_is_told() -> None:
    model = build([node("Relu", ["x"], ["y"])], {"x": [2, 3]}, ["y"])
    changes = {"improve": {**SMOOTH["improve"], **ROTATE["improve"]}}
    result = roundel.quantize(model, recipe="a8w8_minmax", data=feeds({"x": [2, 3]}, 8), changes=changes)
    assert "smoothing: no quantized MatMul or Gemm found" in result.record.notes
    assert any("there is no residual stream" in note for note in result.record.notes)


def test_few_samples_are_told() -> None:
    result = quantized(SMOOTH, tokens(3))
    assert result.record.improvements == ()
    assert "smoothing needs 4 samples or more: left out" in result.record.notes


def once(samples: list[Sample]) -> Iterator[Sample]:
    yield from samples


def test_data_that_can_be_read_only_once(tmp_path: Path) -> None:
    written = []
    for name, data in (("list", tokens(20)), ("once", once(tokens(20)))):
        quantized(SMOOTH, data, output=tmp_path / f"{name}.onnx")
        written.append((tmp_path / f"{name}.onnx").read_bytes())
    assert written[0] == written[1]


def test_few_samples_learn_and_all_calibrate() -> None:
    changes = {"improve": {"samples": 8, **SMOOTH["improve"]}}
    result = quantized(changes, once(tokens(20)))
    assert result.record.data["samples_seen"] == 20
    assert result.record.improvements[0].kept


def test_missing_data_are_an_error() -> None:
    with pytest.raises(roundel.DataError, match="needs calibration data"):
        roundel.quantize(transformer(), recipe="uint8_dynamic_quant", changes=ROTATE)


@pytest.mark.parametrize("recipe", ["a8w8_minmax", "uint8_dynamic_quant", "matmul_nbits", "bf16"])
def test_other_modes_and_formats(recipe: str) -> None:
    changes = {"improve": {**SMOOTH["improve"], **ROTATE["improve"]}}
    result = roundel.quantize(transformer(), recipe=recipe, data=tokens(10), changes=changes)
    assert any(step.step == "rotation" for step in result.record.improvements)
