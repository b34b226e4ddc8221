"""A result that is far off comes with what to try next."""

from __future__ import annotations

import pytest

from roundel.gate import OutputReport, advice
from roundel.recipe.load import load_recipe


def _report(name: str, sqnr_db: float) -> OutputReport:
    return OutputReport(name, sqnr_db, 0.9, 1.0, None)


def test_the_worst_output_is_named() -> None:
    (note,) = advice([_report("a", 11.0), _report("b", 3.25), _report("c", 40.0)], load_recipe("a8w8", {}))
    assert "output 'b'" in note
    assert "3.2 dB" in note
    assert "roundel sensitivity" in note
    assert "effort" not in note


def test_without_effort_that_comes_first() -> None:
    (note,) = advice([_report("a", 3.0)], load_recipe("a8w8", {"effort": "none"}))
    assert "effort fast" in note


@pytest.mark.parametrize(("preset", "sqnr_db"), [("a8w8", 12.0), ("uint8_dynamic_quant", 3.0)])
def test_otherwise_nothing_is_said(preset: str, sqnr_db: float) -> None:
    assert advice([_report("a", sqnr_db)], load_recipe(preset, {})) == ()
