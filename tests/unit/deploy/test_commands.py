"""`roundel deploy` and `roundel npu-report`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from roundel.cli import deploy, npu_report
from roundel.deploy import ReportError
from roundel.errors import ModelError

REPORT = {"deviceStat": [{"name": "CPU", "nodeNum": 2}, {"name": "NPU", "nodeNum": 398}]}


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer(pretty_exceptions_enable=False)
    deploy.register(made)
    npu_report.register(made)
    return made


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
