"""Advice is about the finished model: nothing that was already done, and one line for what is alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import roundel
from roundel.rules import Severity, check


def _head(make: Any, shape: tuple[int | str, ...] = (1, 8, 16, 16)) -> onnx.ModelProto:
    """Two trunk layers, and a head that joins boxes with probabilities."""
    net = make(shape)
    net.conv()
    net.relu()
    net.conv()
    trunk = net.relu()
    boxes = net.add("Mul", net.conv(trunk), net.const(np.full((1, 1, 1, 1), 8, np.float32)))
    scores = net.add("Sigmoid", net.conv(trunk))
    net.add("Concat", boxes, scores, axis=1, name="head")
    proto: onnx.ModelProto = net.proto()
    return proto


def _data(count: int = 6) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, 8, 16, 16)).astype(np.float32) for _ in range(count)]


@pytest.mark.parametrize("preset", ["a8w8", "xint8"])
def test_a_head_that_stays_in_float_is_no_finding_twice(make: Any, preset: str, tmp_path: Path) -> None:
    file = tmp_path / "q.onnx"
    made = roundel.quantize(_head(make), file, preset=preset, data=_data(), device="stx")
    assert "head" in made.record.float_nodes
    report = check(file)
    rules = [found.rule for found in report.findings]
    assert "P13" not in rules, "the head is in float already"
    assert "Q06" not in rules, "a Concat in float needs no common scale"
    gaps = [found for found in report.findings if found.rule == "Q05"]
    assert len(gaps) == 1, "one line for all nodes of the head"
    assert gaps[0].severity is Severity.NOTE
    assert " left in float by the run: decodes detections" in gaps[0].message
    assert not any(note.startswith(("P13", "Q05", "Q06")) for note in made.record.notes)
    assert not made.record.npu["errors"]


def test_without_a_record_the_gaps_are_told(make: Any) -> None:
    made = roundel.quantize(_head(make), preset="a8w8", data=_data())
    gaps = [found for found in check(made.model).findings if found.rule == "Q05"]
    assert len(gaps) > 1
    assert {found.severity for found in gaps} == {Severity.WARNING}


def test_shapes_that_were_fixed_are_not_asked_for_again(make: Any) -> None:
    model = _head(make, (1, 8, "height", "width"))
    options: dict[str, Any] = {"preset": "a8w8_minmax", "data": _data(), "device": "stx"}
    opened = roundel.quantize(model, **options).record
    (told,) = [note for note in opened.notes if note.startswith("P02")]
    words = told.split("-s '")[1].split("'")[0]
    assert words == "prepare.fixed_shapes={image: [1, 8, 16, 16]}", "the size of the data"
    assert opened.verdict.npu.startswith("no, predicted for stx: input 'image' is ")
    fixed = roundel.quantize(model, **options, changes={"prepare.fixed_shapes": {"image": [1, 8, 16, 16]}})
    assert not any(note.startswith("P02") for note in fixed.record.notes)
    assert not fixed.record.npu["errors"]


def test_channels_that_are_zero_in_the_float_model_are_no_broken_checkpoint(make: Any) -> None:
    net = make()
    net.conv()
    net.conv()
    weight = net.array("w0").copy()
    weight[:3] = 0
    net.const(weight, "w0")
    made = roundel.quantize(net.proto(), preset="a8w8_minmax", data=_data())
    (found,) = [f for f in check(made.model).findings if f.rule == "P21"]
    assert found.severity is Severity.NOTE
    assert "3 of 8 output channels" in found.message
    assert "checkpoint" not in found.fix
