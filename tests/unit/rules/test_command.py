"""`roundel check` on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import typer
from typer.testing import CliRunner

from roundel.cli.app import app as commands


@pytest.fixture
def app() -> typer.Typer:
    return commands


@pytest.fixture
def model(architecture: Any, tmp_path: Path) -> str:
    path = tmp_path / "net.onnx"
    onnx.save(architecture("mobilenet_v2"), path)
    return str(path)


def _run(app: typer.Typer, *words: str) -> Any:
    return CliRunner().invoke(app, ["check", *words], env={"COLUMNS": "80"})


def test_text_fits_80_columns(app: typer.Typer, model: str) -> None:
    result = _run(app, model, "--preset", "xint8", "--device", "stx")
    assert result.exit_code == 0, result.output
    assert "18 -> 1" in result.output
    assert "P08" in result.output
    assert "by itself" in result.output
    assert max(len(line) for line in result.output.splitlines()) <= 80


def test_places_can_be_told_apart_without_colour(app: typer.Typer, model: str) -> None:
    text = _run(app, model, "-p", "xint8").output
    now = next(line for line in text.splitlines() if line.startswith(" now"))
    assert len(set(now.removeprefix(" now").strip())) == 2


def test_nodes(app: typer.Typer, model: str) -> None:
    text = _run(app, model, "-p", "a8w8", "--nodes").output
    assert "Conv_0" in text
    assert "NPU 17" in text


def test_json(app: typer.Typer, model: str) -> None:
    result = _run(app, model, "-p", "xint8", "--json", "--nodes")
    tree = json.loads(result.output)
    assert (tree["before"]["islands"], tree["after"]["islands"]) == (18, 1)
    assert tree["passed"] is True
    assert len(tree["before"]["nodes"]) == len(tree["before"]["places"])
    assert {"rule", "severity", "subject", "message", "why", "fix", "automatic"} <= set(tree["findings"][0])


def test_errors_change_the_exit_code(app: typer.Typer, model: str) -> None:
    result = _run(app, model, "-p", "a8w8", "-d", "phx")
    assert result.exit_code == 1
    assert "P19" in result.output


def test_unknown_device_is_explained(app: typer.Typer, model: str) -> None:
    result = _run(app, model, "-d", "stz")
    assert "There is no device 'stz'" in str(result.exception)
    assert "Did you mean 'stx'?" in str(result.exception)
