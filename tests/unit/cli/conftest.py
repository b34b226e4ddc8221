"""The command line as a user meets it: arguments in, text and an exit code out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from roundel.cli import main
from roundel.example import load_example


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str


Roundel = Callable[..., Ran]


@pytest.fixture
def roundel_cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Roundel:
    """Run the command in this process, 80 columns wide, without colours."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")

    def call(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["roundel", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return Ran(code, out, err)

    return call


@pytest.fixture(scope="session")
def digits() -> Path:
    return load_example().model_path


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    """Eight calibration samples as .npy files."""
    folder = tmp_path / "arrays"
    folder.mkdir()
    for index, sample in enumerate(load_example().calibration[:8]):
        np.save(folder / f"{index}.npy", sample["image"])
    return folder
