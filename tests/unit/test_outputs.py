"""Nothing that a run writes may cover what it reads; refused before any work, for every command."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import roundel
from roundel import outputs
from roundel.cli import main
from roundel.example import load_example


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a model, its weights in a file beside it, data, labels and a recipe."""
    proto = onnx.load(load_example().model_path)
    onnx.save(
        proto,
        tmp_path / "model.onnx",
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    samples = load_example().calibration[:4]
    np.savez(tmp_path / "c.npz", image=np.concatenate([sample["image"] for sample in samples]))
    (tmp_path / "data").mkdir()
    for index, sample in enumerate(samples):
        np.save(tmp_path / "data" / f"{index}.npy", sample["image"])
    np.save(tmp_path / "labels.npy", load_example().calibration_labels[:4])
    (tmp_path / "mine.yaml").write_text("extends: a8w8\neffort: none\n")
    (tmp_path / "judge.py").write_text("def right(outputs, labels):\n    return 1.0\n")
    shutil.copyfile(load_example().model_path, tmp_path / "other.onnx")
    (tmp_path / "link.npz").symlink_to(tmp_path / "c.npz")
    return tmp_path


def contents(place: Path) -> dict[str, bytes]:
    return {str(p.relative_to(place)): p.read_bytes() for p in place.rglob("*") if p.is_file()}


QUANTIZE = "quantize model.onnx -r mine.yaml"
ON_DATA = "--data c.npz"
ORDERS = (
    # the model and its record
    (f"{QUANTIZE} {ON_DATA} -o c.npz", "output", "calibration data"),
    (f"{QUANTIZE} {ON_DATA} -o link.npz", "output", "calibration data"),
    (f"{QUANTIZE} --data data -o data/2.npy", "output", "calibration data: 2.npy in data"),
    (f"{QUANTIZE} {ON_DATA} -o model.onnx", "output", "input model"),
    (f"{QUANTIZE} {ON_DATA} -o weights.bin", "output", "input model's external data"),
    (f"{QUANTIZE} {ON_DATA} -o mine.yaml", "output", "recipe"),
    # what is written besides
    (f"{QUANTIZE} {ON_DATA} -o q.onnx --report c.npz", "report", "calibration data"),
    (f"{QUANTIZE} {ON_DATA} -o q.onnx --report model.onnx", "report", "input model"),
    (f"{QUANTIZE} {ON_DATA} -o q.onnx --report q.onnx", "report", "output"),
    (f"{QUANTIZE} {ON_DATA} -o q.onnx --report q.json", "report", "output's record"),
    (f"{QUANTIZE} {ON_DATA} -o q.onnx --stats c.npz", "statistics file", "calibration data"),
    (f"{QUANTIZE} {ON_DATA} -o q.onnx --stats model.onnx", "statistics file", "input model"),
    (f"{QUANTIZE} {ON_DATA} -o q.onnx --stats weights.bin", "statistics file", "external data"),
    (f"{QUANTIZE} {ON_DATA} -o q.onnx --stats q.onnx", "statistics file", "output"),
    # the other commands
    ("convert model.onnx --data c.npz -o c.npz", "output", "data"),
    ("convert model.onnx -o weights.bin", "output", "input model's external data"),
    (f"auto model.onnx {ON_DATA} -o c.npz", "output", "calibration data"),
    (f"auto model.onnx {ON_DATA} -o labels.npy --labels labels.npy", "output", "labels"),
    (f"auto model.onnx {ON_DATA} -o judge.py --metric judge.py:right", "output", "metric"),
    (f"auto model.onnx {ON_DATA} -o data/1.npy --eval-data data", "output", "evaluation data"),
    (f"search model.onnx {ON_DATA} --space weights.per_channel=true -o c.npz", "output", "calibration data"),
    (f"search model.onnx {ON_DATA} --space mine.yaml --save-recipe mine.yaml", "best recipe", "space"),
    (f"search model.onnx {ON_DATA} --space weights.per_channel=true --study c.npz", "study", "data"),
    (f"compare model.onnx other.onnx {ON_DATA} --csv c.npz", "table", "data"),
    (f"compare model.onnx other.onnx {ON_DATA} --csv weights.bin", "table", "external data"),
    (f"compare model.onnx other.onnx {ON_DATA} --csv x --report x", "report", "table"),
    (f"compare model.onnx other.onnx {ON_DATA} --report other.onnx", "report", "quantized model"),
    ("compare model.onnx other.onnx --data data --report data/0.npy", "report", "data"),
    (f"evaluate model.onnx {ON_DATA} --csv c.npz", "table", "data"),
    (f"evaluate model.onnx {ON_DATA} --labels labels.npy --csv labels.npy", "table", "labels"),
    (f"evaluate model.onnx other.onnx {ON_DATA} --csv other.onnx", "table", "models"),
    ("evaluate --baseline data --quantized data --csv data/3.npy", "table", "results"),
    ("infer model.onnx --data data --out data", "outputs", "data"),
)


@pytest.mark.parametrize(("order", "written", "read"), ORDERS, ids=[order for order, _, _ in ORDERS])
def test_what_is_read_is_not_overwritten(
    order: str,
    written: str,
    read: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr("sys.argv", ["roundel", *order.split()])
    before = contents(place)
    with pytest.raises(SystemExit) as leaving:
        main()
    said = " ".join(capsys.readouterr().err.split())
    assert contents(place) == before, said
    assert leaving.value.code == 5, said
    headline = said.partition(" where:")[0]
    assert written in headline
    assert read in headline.partition("would overwrite")[2]


def test_a_record_is_not_overwritten_by_its_repetition(place: Path) -> None:
    roundel.quantize(place / "model.onnx", place / "q.onnx", recipe="a8w8_minmax", data=place / "c.npz")
    before = contents(place)
    with pytest.raises(roundel.OutputError, match="would overwrite the record"):
        roundel.reproduce(place / "q.json", output=place / "q.onnx")
    assert contents(place) == before


def test_a_second_name_of_the_data_is_the_data(place: Path) -> None:
    os.link(place / "c.npz", place / "again.npz")
    with pytest.raises(roundel.OutputError, match="calibration data"):
        roundel.quantize(place / "model.onnx", place / "again.npz", data=place / "c.npz")


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(roundel.OutputError) as caught:
        call()
    return caught.value.what


def test_from_python_too(place: Path) -> None:
    model, data = place / "model.onnx", place / "c.npz"
    assert "data" in refused(lambda: roundel.quantize(model, data, data=data))
    assert "data" in refused(lambda: roundel.quantize(str(model), str(data), data=str(data)))
    assert "data" in refused(lambda: roundel.write_report(data, model, place / "other.onnx", data))
    assert "models" in refused(lambda: roundel.evaluate([model], data, csv=model))


def test_a_model_may_be_written_into_the_folder_of_its_data(place: Path) -> None:
    model, data = load_example().model_path, place / "data"
    for _ in range(2):  # the second time, a file is there, and it is no data
        roundel.quantize(model, data / "q.onnx", recipe="a8w8_minmax", data=data, effort="none")
    assert (data / "q.onnx").exists()


def test_a_model_is_looked_through_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, looked = place / "q.onnx", []
    words: dict[str, Any] = {"recipe": place / "mine.yaml", "data": place / "c.npz"}
    roundel.quantize(place / "model.onnx", out, **words)
    plain = outputs._external_files
    monkeypatch.setattr(outputs, "_external_files", lambda p, size: looked.append(p) or plain(p, size))
    roundel.quantize(place / "model.onnx", out, **words)
    assert looked.count(place / "model.onnx") == 1
