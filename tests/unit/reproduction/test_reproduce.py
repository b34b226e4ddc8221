"""`roundel reproduce`: the same bytes again, or what has changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

import roundel
from fuzzing.seeds import models
from helpers import feeds
from roundel.cli.app import app
from roundel.errors import DataError, ModelError, RecipeError
from roundel.recipe.load import known_recipe, read_record


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The record of a finished run."""
    onnx.save(models()[0], tmp_path / "model.onnx")
    (tmp_path / "data").mkdir()
    for index, sample in enumerate(feeds({"x": (1, 3, 8, 8)}, count=5)):
        np.save(tmp_path / "data" / f"{index}.npy", sample["x"])
    roundel.quantize(tmp_path / "model.onnx", tmp_path / "out.onnx", recipe="xint8", data=tmp_path / "data")
    return tmp_path / "out.json"


def changed(record: Path, *keys: str, value: Any) -> None:
    tree = json.loads(record.read_text())
    part = tree
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    record.write_text(json.dumps(tree))


def test_a_run_repeats(run: Path, tmp_path: Path) -> None:
    before = sorted(path.name for path in tmp_path.rglob("*"))
    again = roundel.reproduce(run)
    assert again.matches
    assert again.differences == ()
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_the_record_holds_hashes_versions_and_seeds(run: Path) -> None:
    tree = json.loads(run.read_text())
    assert len(tree["model"]["sha256"]) == len(tree["file"]["sha256"]) == len(tree["data"]["digest"]) == 64
    assert {"roundel", "numpy", "onnx", "onnx-ir", "onnxruntime", "python"} <= tree["versions"].keys()
    assert isinstance(tree["recipe"]["improve"]["finetune"]["seed"], int)


@pytest.mark.parametrize("data", [roundel.RandomData(count=3, seed=7), None], ids=["random", "none"])
def test_data_that_need_no_file(data: Any, tmp_path: Path) -> None:
    onnx.save(models()[0], tmp_path / "model.onnx")
    recipe = "a8w8" if data is not None else "bf16"
    roundel.quantize(tmp_path / "model.onnx", tmp_path / "out.onnx", recipe=recipe, data=data)
    assert roundel.reproduce(tmp_path / "out.json").matches


def test_weights_in_a_file_of_another_name(tmp_path: Path) -> None:
    onnx.save(models()[2], tmp_path / "model.onnx")
    (tmp_path / "out.onnx.data").write_bytes(b"in the way")
    changes = {"output": {"external_data": True}, "effort": "none"}
    data = roundel.RandomData(count=2, ranges={"ids": (0, 30)})
    roundel.quantize(tmp_path / "model.onnx", tmp_path / "out.onnx", data=data, changes=changes)
    assert roundel.reproduce(tmp_path / "out.json").matches


def test_other_data_are_named(run: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "data" / "0.npy", np.full((1, 3, 8, 8), 9, np.float32))
    again = roundel.reproduce(run)
    assert not again.matches
    assert [difference.what for difference in again.differences] == ["data", "quantized model"]


def test_another_model_is_named(run: Path, tmp_path: Path) -> None:
    other = onnx.load(tmp_path / "model.onnx")
    other.graph.node[0].name = "renamed"
    onnx.save(other, tmp_path / "other.onnx")
    again = roundel.reproduce(run, model=tmp_path / "other.onnx")
    assert {"model file", "quantized model"} <= {difference.what for difference in again.differences}


def test_another_version_is_named_though_the_bytes_are_the_same(run: Path) -> None:
    changed(run, "versions", "onnxruntime", value="1.2.3")
    again = roundel.reproduce(run)
    assert again.matches
    assert str(again.differences[0]).startswith("version of onnxruntime: 1.2.3 then")


def test_fields_that_recipes_no_longer_have(run: Path) -> None:
    changed(run, "recipe", "improve", "biases", value=True)
    changed(run, "recipe", "improve", "finetune", "drop_ratio", value=1.0)
    changed(run, "recipe", "improve", "finetune", "lr_adjust", value=None)
    assert roundel.reproduce(run).matches
    assert known_recipe(read_record(run.with_suffix(".onnx"))) is not None  # for comparisons and reports
    changed(run, "recipe", "improve", "finetune", "block_wise", value=True)
    assert known_recipe(read_record(run.with_suffix(".onnx"))) is None
    with pytest.raises(RecipeError, match="block_wise") as caught:
        roundel.reproduce(run)
    details = dict(caught.value.details())
    assert str(run) in str(details)
    assert "without improve.finetune.block_wise" in str(details)


def test_things_that_have_moved(run: Path, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").rename(tmp_path / "moved.onnx")
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="was not found"):
        roundel.reproduce(run)
    with pytest.raises(DataError, match="were not found"):
        roundel.reproduce(run, model=tmp_path / "moved.onnx")
    kept = tmp_path / "kept.onnx"
    again = roundel.reproduce(run, model=tmp_path / "moved.onnx", data=tmp_path / "elsewhere", output=kept)
    assert again.matches
    assert kept.read_bytes() == (tmp_path / "out.onnx").read_bytes()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"record_version": 1, "recipe": 3}', "[" * 100_000])
def test_what_is_no_record(text: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(RecipeError, match="record"):
        roundel.reproduce(tmp_path / "r.json")


@pytest.mark.parametrize("name", ["../out.onnx", "/tmp/out.onnx", None])
def test_a_record_whose_file_name_leads_elsewhere(run: Path, name: str | None) -> None:
    changed(run, "file", "name", value=name)
    with pytest.raises(RecipeError):
        roundel.reproduce(run)


def test_the_command(run: Path, tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["reproduce", str(run)])
    assert told.exit_code == 0
    assert "the same, byte for byte" in told.output
    np.save(tmp_path / "data" / "0.npy", np.full((1, 3, 8, 8), 9, np.float32))
    told = CliRunner().invoke(app, ["reproduce", str(run), "--json"])
    assert told.exit_code == 1
    assert json.loads(told.output)["matches"] is False
