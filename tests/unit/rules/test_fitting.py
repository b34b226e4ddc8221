"""What a device and an effort change in a recipe, and that they leave alone what the user has set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import roundel
from roundel.recipe.load import load_recipe
from roundel.rules import check
from roundel.rules.report import for_device, for_effort

# device, field, what the user sets; the device or the effort would make the other of it
_FIELDS = [
    (None, "npu.clip_to_relu", False),
    (None, "prepare.scale_clip_bounds", False),
    ("stx", "npu.clip_to_relu", False),
    ("stx", "prepare.scale_clip_bounds", False),
    ("stx", "npu.sigmoid_to_hard_sigmoid", True),
]


def _value(recipe: Any, field: str) -> bool:
    section, name = field.split(".")
    return bool(getattr(getattr(recipe, section), name))


@pytest.mark.parametrize(("device", "field", "own"), _FIELDS)
def test_what_the_user_sets_stays(tmp_path: Path, device: str | None, field: str, own: bool) -> None:
    section, name = field.split(".")
    tree = {"extends": "xint8", section: {name: own}}
    file = tmp_path / "mine.yaml"
    file.write_text(f"extends: xint8\n{section}: {{{name}: {str(own).lower()}}}\n")
    preset = load_recipe("xint8")
    for recipe in (
        load_recipe("xint8", {field: own}),
        load_recipe(preset, {field: own}),
        load_recipe(load_recipe(tree), {"effort": "fast"}),
        load_recipe(str(file)),
        preset.merged({section: {name: own}}).merged({"effort": "fast"}),
    ):
        assert _value(for_effort(for_device(recipe, device)), field) is own
    assert _value(for_effort(for_device(preset, device)), field) is not own


@pytest.mark.parametrize("effort", ["none", "fast"])
def test_a_written_model_keeps_what_the_user_asked_for(make: Any, effort: str) -> None:
    net = make()
    net.conv(kernel=3)
    net.clip()
    net.conv()
    net.add("Sigmoid")
    asked = {"npu": {"clip_to_relu": False, "sigmoid_to_hard_sigmoid": True}, "effort": effort}
    done = roundel.quantize(
        net.proto(), recipe="xint8", changes=asked, data=roundel.RandomData(), samples=4, device="stx"
    )
    kinds = {node.op_type for node in done.ir.graph}
    assert {"Clip", "HardSigmoid"} <= kinds
    assert not kinds & {"Relu", "Sigmoid"}


def test_the_check_promises_no_fix_that_the_user_has_switched_off(make: Any) -> None:
    net = make()
    for _ in range(2):
        net.conv(kernel=3)
        net.clip()
    model = net.classifier().proto()
    kept = load_recipe("xint8", {"npu.clip_to_relu": False})
    report = check(model, preset=kept, device="stx")
    assert report.after == report.before
    assert not any(f.automatic for f in report.findings if f.rule == "P08")
    assert check(model, preset="xint8", device="stx").after != report.before
