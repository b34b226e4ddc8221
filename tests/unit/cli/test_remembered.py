"""What a run was told is not asked again: later commands read it from the record beside the model."""

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


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, what was made of it, and all that it was made with."""
    home, example = tmp_path_factory.mktemp("run"), load_example()
    parts = {
        "calib": ([next(iter(sample.values()))[0] for sample in example.calibration[:16]], [0] * 16),
        "val": (example.eval_x[:30], example.eval_y),
    }
    for name, (images, labels) in parts.items():
        for number, (image, label) in enumerate(zip(images, labels, strict=False)):
            file = home / name / str(label) / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            PIL.Image.fromarray(((image[0] + 1) * 127.5).round().astype(np.uint8)).save(file)
    (home / "model.onnx").write_bytes(example.model_path.read_bytes())
    words = ("-p", "a8w8_minmax", "--mean", "0.5", "--std", "0.5", "--device", "krk")
    judged = ("--eval-data", home / "val", "--labels", "folders")
    call("quantize", home / "model.onnx", "-o", home / "q.onnx", "--data", home / "calib", *words, *judged)
    return home


def call(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def tree(*words: object) -> Any:
    return json.loads(call(*words, "--json"))


def test_evaluate_asks_for_nothing(run: Path) -> None:
    models = tree("evaluate", run / "model.onnx", run / "q.onnx")["models"]
    record = json.loads((run / "q.json").read_text())
    assert [model["top1"] for model in models] == [score["top1"] for score in record["scores"]]
    assert not models[1]["notes"]


def test_other_data_are_prepared_likewise(run: Path) -> None:
    words = ("evaluate", run / "model.onnx", run / "q.onnx", "--data", run / "val", "--labels", "folders")
    assert tree(*words)["models"][0]["top1"] == 1.0
    assert tree(*words, "--mean", "0.5,0.5,0.5", "--std", "0.5")["models"][1]["notes"] == [], "no conflict"


def test_a_word_wins_and_a_conflict_is_told_once(run: Path) -> None:
    words = ("evaluate", run / "model.onnx", run / "q.onnx", "--data", run / "val", "--mean", "0.1")
    notes = [note for model in tree(*words)["models"] for note in model["notes"]]
    assert len(notes) == 1
    assert "mean (0.1,)" in notes[0]


def test_compare_and_its_report_know_the_data_and_the_device(run: Path) -> None:
    page = run / "page.html"
    found = tree("compare", run / "model.onnx", run / "q.onnx", "--report", page)
    assert found["samples"] == 16
    assert found["data"]["preprocessing"].count("mean (0.5,)") == 1
    assert "predicted for krk" in found["verdict"]["npu"]
    assert found["verdict"]["npu"].split(":")[0] in page.read_text()
    judged = tree("compare", run / "model.onnx", run / "q.onnx", "--labels", "folders")
    assert judged["scores"][0]["rows"] == 30
    assert judged["verdict"]["accurate"].startswith("top-1 ")


def test_sensitivity_of_a_quantized_model_is_that_of_its_float_model(run: Path) -> None:
    told = tree("sensitivity", run / "q.onnx", "--look", "2")
    asked = (
        run / "model.onnx",
        "-p",
        "a8w8_minmax",
        "--data",
        run / "calib",
        "--mean",
        "0.5",
        "--std",
        "0.5",
    )
    assert told["layers"] == tree("sensitivity", *asked, "--look", "2")["layers"]


def test_without_a_record_data_are_asked_for(run: Path) -> None:
    for words in (("compare", run / "model.onnx", run / "model.onnx"), ("sensitivity", run / "model.onnx")):
        with pytest.raises(RoundelError, match="No data was given"):
            call(*words)


def test_data_that_have_moved_are_asked_for(run: Path, tmp_path: Path) -> None:
    record = json.loads((run / "q.json").read_text())
    record["data"]["path"] = "gone"
    (tmp_path / "q.json").write_text(json.dumps(record))
    (tmp_path / "q.onnx").write_bytes((run / "q.onnx").read_bytes())
    with pytest.raises(RoundelError, match="--data PATH"):
        call("compare", run / "model.onnx", tmp_path / "q.onnx")
