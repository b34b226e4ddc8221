"""`roundel deploy` and `roundel npu-report`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from roundel.cli.app import app as commands
from roundel.errors import ModelError, RecipeError
from roundel.example import load_example
from roundel.kit import ReportError
from roundel.rules import check

REPORT = {"deviceStat": [{"name": "CPU", "nodeNum": 2}, {"name": "NPU", "nodeNum": 398}]}


@pytest.fixture
def app() -> typer.Typer:
    return commands


def call(app: typer.Typer, *words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_deploy(app: typer.Typer, a8w8: Path, tmp_path: Path) -> None:
    shown = call(app, "deploy", a8w8, "--device", "krk", "-o", tmp_path / "kit")
    assert "A8W8" in shown
    assert "run.py" in shown
    told = json.loads(call(app, "deploy", a8w8, "-d", "krk", "-o", tmp_path / "kit", "--json"))
    assert told["device"] == "krk"
    assert told["provider_options"]["target"] == "X2"
    with pytest.raises(ModelError):
        call(app, "deploy", a8w8, "-d", "phx", "-o", tmp_path / "other")


def test_npu_report(app: typer.Typer, a8w8: Path, tmp_path: Path) -> None:
    path = tmp_path / "vitisai_ep_report.json"
    path.write_text(json.dumps(REPORT))
    assert "99.5% of the operators" in call(app, "npu-report", path)
    assert "ran on" in call(app, "npu-report", path, "--model", a8w8)
    told = json.loads(call(app, "npu-report", path, "--model", a8w8, "--json"))
    assert told["npu_ops"] == 398
    assert told["model"]["Conv"]["ran_on"] == "-"
    path.write_text("{")
    with pytest.raises(ReportError):
        call(app, "npu-report", path)


def test_npu_report_beside_the_prediction(app: typer.Typer, a8w8: Path, tmp_path: Path) -> None:
    path = tmp_path / "session.log"
    path.write_text("[Vitis AI EP] No. of Operators : CPU 3 NPU 40 VITIS_EP_CPU 2\n")
    told = json.loads(call(app, "npu-report", path, "--model", a8w8, "--device", "krk", "--json"))
    compared = told["comparison"]
    assert (compared["format"], compared["device"]) == ("a8w8", "krk")
    judged = check(a8w8, device="krk").before
    rows = {row["quantity"]: (row["predicted"], row["reported"]) for row in compared["rows"]}
    # Q/DQ count among the NPU's operators, so an integer model has no such row.
    assert rows == {
        "operators on the CPU": (judged.cpu_nodes, 3),
        "islands on the NPU": (judged.islands, None),
    }
    shown = call(app, "npu-report", path, "--model", a8w8)
    assert "Predicted for a8w8 on stx" in shown
    assert f"{3 - judged.cpu_nodes:+d}" in shown


def test_a_float_model_is_predicted_as_bf16_unless_told(app: typer.Typer, tmp_path: Path) -> None:
    path = tmp_path / "vitisai_ep_report.json"
    path.write_text(json.dumps(REPORT))
    model = load_example().model_path
    compared = json.loads(call(app, "npu-report", path, "--model", model, "--json"))["comparison"]
    assert compared["format"] == "bf16"
    assert compared["rows"][0] == {
        "quantity": "operators on the NPU",
        "predicted": check(model, preset="bf16").before.npu_nodes,
        "reported": 398,
    }
    words = ("npu-report", path, "--model", model, "--preset", "xint8", "-d", "hpt", "--json")
    compared = json.loads(call(app, *words))["comparison"]
    assert (compared["format"], compared["device"]) == ("xint8", "hpt")
    assert any("borders" in note for note in compared["notes"])


@pytest.mark.parametrize("words", [("--preset", "a8w8"), ("--device", "stx")])
def test_a_prediction_needs_the_model(app: typer.Typer, tmp_path: Path, words: tuple[str, str]) -> None:
    path = tmp_path / "vitisai_ep_report.json"
    path.write_text(json.dumps(REPORT))
    with pytest.raises(RecipeError, match="no model") as caught:
        call(app, "npu-report", path, *words)
    assert caught.value.where == words[0]
