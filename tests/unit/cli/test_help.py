"""Help, suggestions, and a start that loads nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import roundel

COMMANDS = ("quantize", "explain", "inspect", "presets", "demo")
HEAVY = ("numpy", "onnx", "onnxruntime", "onnx_ir", "onnxscript", "pydantic", "torch", "PIL", "yaml")


def test_help_lists_the_commands(roundel_cli: Any) -> None:
    ran = roundel_cli("--help")
    assert ran.code == 0
    for command in COMMANDS:
        assert command in ran.out
    assert "First look: roundel demo" in ran.out


def test_no_arguments_show_the_help(roundel_cli: Any) -> None:
    assert "Usage" in roundel_cli().out


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_shows_an_example(roundel_cli: Any, command: str) -> None:
    ran = roundel_cli(command, "--help")
    assert ran.code == 0
    _, _, examples = ran.out.partition("Example")
    assert f"roundel {command}" in examples
    assert all(len(line) <= 80 for line in ran.out.splitlines())


def test_the_version(roundel_cli: Any) -> None:
    assert roundel_cli("--version").out == f"roundel {roundel.__version__}\n"


def test_a_misspelt_command(roundel_cli: Any) -> None:
    ran = roundel_cli("quantise")
    assert ran.code == 2
    assert "quantize" in ran.err


def test_a_misspelt_option(roundel_cli: Any, digits: Any) -> None:
    ran = roundel_cli("quantize", digits, "-o", "x.onnx", "--presett", "a8w8")
    assert ran.code == 2
    assert "--preset" in ran.err


def test_a_missing_argument(roundel_cli: Any, digits: Any) -> None:
    ran = roundel_cli("quantize", digits)
    assert ran.code == 2
    assert "--output" in ran.err


@pytest.mark.parametrize("module", ["roundel", "roundel.cli.app"])
def test_the_import_is_lean(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{m.partition('.')[0] for m in sys.modules}}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(HEAVY).isdisjoint(loaded.stdout.split())


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "roundel", "--version"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout == f"roundel {roundel.__version__}\n"


def test_public_names_resolve() -> None:
    for name in roundel.__all__:
        assert getattr(roundel, name) is not None
    assert set(roundel.__all__) <= set(dir(roundel))
    with pytest.raises(AttributeError, match="quantise"):
        roundel.quantise  # noqa: B018
