"""`roundel auto` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

QUICK = ("--rungs", "xint8,a16w8")


def test_a_budget_that_is_met(roundel_cli: Any, digits: Path, arrays: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    ran = roundel_cli("auto", digits, "-o", out, "--data", arrays, "--max-drop", "90%", *QUICK)
    assert ran.code == 0
    assert out.exists()
    assert "agreement" in ran.out
    assert "chosen" in ran.out
    assert "\nmet: XINT8, effort fast in out.onnx stays within 90%: drop 0.00% ±" in ran.out
    assert "xint8: " in ran.err
    assert all(len(line) <= 80 for line in ran.out.splitlines())


def test_doubt_is_told(roundel_cli: Any, digits: Path, arrays: Path, tmp_path: Path) -> None:
    ran = roundel_cli(
        "auto", digits, "-o", tmp_path / "o.onnx", "--data", arrays, "--max-drop", "50%", *QUICK
    )
    assert ran.code == 0
    plain = " ".join(ran.out.split())
    assert "probably met: XINT8, effort fast in o.onnx stays within 50%: drop 0.00% ±69.30% (95 %)" in plain
    assert "with a probability of 92%, and about 4 rows would tell" in plain
    assert "undecided (92% likely to be within the budget)" in " ".join(ran.err.split())


def test_a_decoder_is_for_boxes(roundel_cli: Any, digits: Path, arrays: Path, tmp_path: Path) -> None:
    ran = roundel_cli("auto", digits, "-o", tmp_path / "o.onnx", "--data", arrays, "--decoder", "yolov8")
    assert ran.code == 2
    assert "A decoder is for boxes" in ran.err


def test_a_budget_that_cannot_be_met(roundel_cli: Any, digits: Path, arrays: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    words = ("--max-drop", "0", "--metric", "fidelity")
    ran = roundel_cli("auto", digits, "-o", out, "--data", arrays, *words, *QUICK)
    assert ran.code == 9
    assert out.exists()
    plain = " ".join(ran.out.split())
    assert "not met: no rung stays within 0; the best, A16W8, effort fast" in plain
    assert "was handed over in out.onnx" in plain


def test_as_json(roundel_cli: Any, digits: Path, arrays: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    ran = roundel_cli("auto", digits, "-o", out, "--data", arrays, "--max-drop", "50%", *QUICK, "--json")
    tree = json.loads(ran.out)
    assert tree["ladder"][0]["rung"] == "xint8"
    assert tree == json.loads(out.with_suffix(".auto.json").read_text())


def test_a_misspelt_rung(roundel_cli: Any, digits: Path, arrays: Path, tmp_path: Path) -> None:
    ran = roundel_cli("auto", digits, "-o", tmp_path / "o.onnx", "--data", arrays, "--rungs", "xint88")
    assert ran.code == 2
    assert "Did you mean 'xint8'" in ran.err


def test_the_help_shows_examples(roundel_cli: Any) -> None:
    ran = roundel_cli("auto", "--help")
    assert "--max-drop" in ran.out
    assert "Exit code 9" in ran.out
