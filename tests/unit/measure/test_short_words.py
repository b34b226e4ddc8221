"""What a result says of itself at the prompt: a few lines, with the main figures, however large it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import roundel
from roundel.example import load_example
from roundel.plain import Card

EXAMPLE = load_example()
DATA = EXAMPLE.calibration[:8]


def short(result: Card) -> str:
    words = repr(result)
    assert len(words.splitlines()) <= 5
    assert len(words) < 500
    assert type(result).__name__ in result._repr_html_()
    return words


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("short") / "q.onnx"
    roundel.quantize(EXAMPLE.model_path, path, recipe="a8w8", data=DATA, effort="none")
    return path


def test_a_comparison(quantized: Path) -> None:
    found = roundel.compare(EXAMPLE.model_path, quantized, DATA)
    output = found.outputs[0]
    assert f"{output.name} {output.difference.sqnr_db:.1f} dB" in short(found)
    assert f"{len(found.tensors)} tensors" in short(found)


def test_scores(quantized: Path) -> None:
    first, second = roundel.evaluate_models([EXAMPLE.model_path, quantized], DATA)
    assert f"{first.rows} rows" in short(first)
    assert f"agreement {second.agreement:.2%}" in short(second)
    assert f"{second.sqnr_db:.1f} dB" in short(second)


def test_sensitivity() -> None:
    found = roundel.sensitivity(EXAMPLE.model_path, data=DATA)
    assert found.layers[0].name in short(found)


def test_auto_and_search() -> None:
    ladder = roundel.auto(EXAMPLE.model_path, data=DATA, rungs=["xint8"], max_drop=1)
    assert "xint8, within 1" in short(ladder)
    space = {"weights.method": ["minmax", "mse"]}
    found = roundel.search(EXAMPLE.model_path, data=DATA, space=space, trials=1)
    assert "1 of 1 trial" in short(found)
    assert "weights.method=" in short(found)


def test_folders_and_files(tmp_path: Path) -> None:
    data = {f"{n}": np.zeros(3) for n in range(50)}
    for side in ("a", "b"):
        (tmp_path / side).mkdir()
        for name, array in data.items():
            np.save(tmp_path / side / f"{name}.npy", array)
    scores = roundel.evaluate_folders(tmp_path / "a", tmp_path / "b")
    assert "50 files" in short(scores)
    saved = roundel.infer(EXAMPLE.model_path, DATA, tmp_path / "out")
    assert f"{len(saved.files)} files" in short(saved)
