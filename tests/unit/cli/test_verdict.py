"""The three questions behind a run, answered at the end of the summary and in the record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from typer.testing import CliRunner

from roundel.cli.app import app
from roundel.errors import RoundelError
from roundel.example import load_example

IMAGES = ("--mean", "0.5", "--std", "0.5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits as PNG files: 24 to calibrate and 40 to judge, each in its class's folder."""
    home, example = tmp_path_factory.mktemp("digits"), load_example()
    calibration = [next(iter(sample.values()))[0] for sample in example.calibration[:24]]
    parts = {
        "calib": (calibration, example.calibration_labels),
        "val": (example.eval_x[:40], example.eval_y),
    }
    for name, (images, labels) in parts.items():
        for number, (image, label) in enumerate(zip(images, labels, strict=False)):
            file = home / name / str(label) / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            PIL.Image.fromarray(((image[0] + 1) * 127.5).round().astype(np.uint8)).save(file)
    (home / "model.onnx").write_bytes(example.model_path.read_bytes())
    return home


def call(folder: Path, *words: str) -> str:
    """What a command prints, with the names of files in the folder as paths."""
    paths = [str(folder / word) if (folder / word).exists() else word for word in words]
    done = CliRunner().invoke(app, paths, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def quantize(folder: Path, name: str, *words: str) -> tuple[dict[str, Any], str]:
    out = folder / name
    text = call(folder, "quantize", "model.onnx", "-o", str(out), "--data", "calib", *words)
    return json.loads(out.with_suffix(".json").read_text()), " ".join(text.split())


def test_accuracy_before_and_after_with_its_interval(folder: Path) -> None:
    record, text = quantize(folder, "q.onnx", *IMAGES, "--eval-data", "val", "--labels", "folders")
    before, after = record["scores"]
    assert before["rows"] == after["rows"] == 40
    assert before["top1"] >= 0.9
    assert before["margin"] is None
    assert 0 < after["margin"] < 0.3
    assert record["asked"]["labels"] == "folders"
    assert record["asked"]["eval_data"] == str(folder / "val")
    assert f"top-1 {before['top1']:.2%} -> {after['top1']:.2%}" in text
    assert "points (95 %) on 40 rows" in text
    assert record["verdict"]["accurate"] in text


def test_without_labels_it_says_how_near_the_outputs_are(folder: Path) -> None:
    record, text = quantize(folder, "plain.onnx", *IMAGES)
    assert record["verdict"]["level"] in ("good", "doubtful")
    assert " dB at output logits, same answer on " in text
    assert "on the NPU? " in text
    assert "predicted for stx" in text
    assert record["npu"]["npu_nodes"] + record["npu"]["cpu_nodes"] > 10


def test_the_next_command_runs_as_it_is_printed(folder: Path) -> None:
    record, text = quantize(folder, "poor.onnx", "--effort", "none", *IMAGES)
    command = record["verdict"]["next"]
    assert command in text
    assert record["verdict"]["level"] == "poor"
    program, *words = command.split()
    assert program == "roundel"
    call(folder, *words)
    better = json.loads((folder / "poor.fast.json").read_text())
    assert better["recipe"]["data"]["mean"] == [0.5], "what was asked for once is not lost"
    assert better["outputs"][0]["sqnr_db"] > record["outputs"][0]["sqnr_db"]


@pytest.mark.parametrize("labels", [r"re:(\d+)\.png", "numbers.json"])
def test_labels_outside_the_classes_are_an_error(folder: Path, labels: str) -> None:
    images = sorted((folder / "val").rglob("*.png"))
    (folder / "numbers.json").write_text(json.dumps({image.name: 1592084 for image in images}))
    with pytest.raises(RoundelError, match="A label is no class of the model") as failed:
        call(folder, "evaluate", "model.onnx", "--data", "val", *IMAGES, "--labels", labels)
    assert "0 to 9" in str(failed.value)


def test_labels_without_data_are_an_error(folder: Path) -> None:
    with pytest.raises(RoundelError, match="--eval-data"):
        quantize(folder, "no.onnx", "--labels", "folders")
    assert not (folder / "no.onnx").exists()


def test_random_data_decide_nothing(folder: Path) -> None:
    out = folder / "random.onnx"
    text = call(folder, "quantize", "model.onnx", "-o", str(out), "--random", "4", "--effort", "none")
    assert "unknown: " in text
    assert json.loads(out.with_suffix(".json").read_text())["verdict"]["level"] == "unknown"
