"""infer, evaluate and compare on the command line."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import roundel
from roundel.example import load_example
from roundel.measure.types import Comparison


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "digits.a8w8.onnx"
    data = load_example().calibration[:8]
    roundel.quantize(load_example().model_path, path, recipe="a8w8", data=data, effort="none")
    return path


def test_compare_fits_80_columns_and_writes_json_and_csv(
    roundel_cli: Callable[..., Any], digits: Path, arrays: Path, quantized: Path, tmp_path: Path
) -> None:
    words = ("compare", digits, quantized, "--data", arrays)
    shown = roundel_cli(*words, "--all", "--weights", "--csv", tmp_path / "t.csv")
    assert shown.code == 0
    lines = [line.rstrip() for line in shown.out.splitlines() if not line.startswith(" next: ")]
    assert max(map(len, lines)) <= 80
    assert "stem_relu6_out" in shown.out
    tree = json.loads(roundel_cli(*words, "--json").out)
    rows = list(csv.DictReader((tmp_path / "t.csv").open(encoding="utf-8")))
    assert len(rows) == len(tree["tensors"]) + len(tree["weights"])
    assert tree["samples"] == 8
    assert Comparison.from_dict(tree).outputs[0].name == "logits"
    worst = roundel_cli(*words)
    assert "cost the outputs most" in worst.out


def test_evaluate_takes_folders_by_any_of_their_names(
    roundel_cli: Callable[..., Any], digits: Path, arrays: Path, quantized: Path, tmp_path: Path
) -> None:
    base, other = tmp_path / "base", tmp_path / "other"
    for model, folder in ((digits, base), (quantized, other)):
        assert roundel_cli("infer", model, "--data", arrays, "--out", folder).code == 0
    forms = (
        ("--baseline", base, "--quantized", other),
        ("--baseline_results_folder", base, "--quantized_results_folder", other),
        (base, other),
    )
    said = [roundel_cli("evaluate", *form, "--json").out for form in forms]
    assert said[0] == said[1] == said[2]
    assert json.loads(said[0])["metrics"]["cosine"]["worst"] > 0.8
    shown = roundel_cli("evaluate", base, other, "--csv", tmp_path / "s.csv")
    assert "cosine" in shown.out
    assert len((tmp_path / "s.csv").read_text().splitlines()) == 9


def test_evaluate_models_shows_them_side_by_side(
    roundel_cli: Callable[..., Any], digits: Path, arrays: Path, quantized: Path, tmp_path: Path
) -> None:
    labels = tmp_path / "labels.txt"
    labels.write_text("\n".join(map(str, load_example().calibration_labels[:8])))
    shown = roundel_cli("evaluate", digits, quantized, "--data", arrays, "--labels", labels)
    assert shown.code == 0
    assert "top-5" in shown.out
    table = roundel_cli("evaluate", digits, quantized, "--data", arrays, "--labels", labels, "--json").out
    first, second = json.loads(table)["models"]
    assert first["top1"] == 1.0
    assert second["agreement"] >= 0.75
    assert second["rows"] == 8


@pytest.mark.parametrize(
    "words",
    [
        ("evaluate",),
        ("evaluate", "--baseline", "x"),
        ("evaluate", "MODEL", "--baseline", "x", "--quantized", "y"),
        ("evaluate", "MODEL"),
        ("compare", "MODEL", "MODEL"),
        ("infer", "MODEL", "--out", "o"),
        ("infer", "MODEL", "--out", "o", "--data", "d", "--random", "2"),
        ("infer", "MODEL", "--out", "o", "--random", "2", "--scale", "loud"),
    ],
)
def test_half_an_order_is_refused_with_a_hint(
    words: tuple[str, ...], roundel_cli: Callable[..., Any], digits: Path, tmp_path: Path
) -> None:
    ran = roundel_cli(*(digits if word == "MODEL" else word for word in words))
    if words == ("evaluate",):  # no order at all: the help, with the exit code of this version of click
        assert "Usage: " in ran.out
    else:
        assert ran.code == 2
        assert "expected: " in ran.err
    assert not (tmp_path / "o").exists()


def test_random_samples_for_a_first_look(
    roundel_cli: Callable[..., Any], digits: Path, quantized: Path, tmp_path: Path
) -> None:
    ran = roundel_cli("compare", digits, quantized, "--random", 2, "--json")
    assert json.loads(ran.out)["data"]["random"]
