"""What CONTRIBUTING.md says of changes that come often: these files, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

import roundel
from finetune_cases import conv_net, pictures
from roundel.recipe import load
from roundel.rules import report
from roundel.rules.facts import Facts
from roundel.rules.types import Finding, Severity, rule, rules_of


def test_a_preset_is_one_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    presets = tmp_path / "presets"
    presets.mkdir()
    for file in (resources.files("roundel") / "presets").iterdir():
        (presets / file.name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    (presets / "narrow.yaml").write_text("title: A8W8, tighter\nextends: a8w8\ncalibration: {margin: 1.5}\n")
    monkeypatch.setattr(load.resources, "files", lambda package: tmp_path)
    load.preset_names.cache_clear()
    request.addfinalizer(load.preset_names.cache_clear)
    assert "narrow" in load.preset_names()
    recipe = roundel.load_recipe("narrow")
    assert recipe.calibration.margin == 1.5
    assert recipe.weights == roundel.load_recipe("a8w8").weights
    result = roundel.quantize(conv_net(), preset="narrow", data=pictures(2))
    assert result.record.recipe["calibration"]["margin"] == 1.5


def test_an_npu_rule_is_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {finding.rule for finding in report.check(conv_net()).findings}
    assert "P99" not in before

    @rule("P99", "names", "Rename the node.")
    def short_names(facts: Facts) -> Iterator[Finding]:
        """Nothing happens on the NPU."""
        for node in facts.raw.graph:
            yield Finding(Severity.NOTE, "its name is short", f"{node.op_type} '{node.name}'")

    module = type(load)("a_file_of_rules")
    module.short_names = short_names  # type: ignore[attr-defined]
    monkeypatch.setattr(report, "RULES", (*report.RULES, *rules_of(module)))
    found = [finding for finding in report.check(conv_net()).findings if finding.rule == "P99"]
    assert found
    assert all(finding.fix == "Rename the node." for finding in found)
    assert all(finding.why == "Nothing happens on the NPU." for finding in found)
