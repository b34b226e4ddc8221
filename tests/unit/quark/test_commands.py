"""`quark-cli onnx-ptq`, and what the other commands say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

from helpers import initializers, rng
from roundel.quark.commands import main, run
from script_cases import Reader

pytestmark = pytest.mark.usefixtures("capsys")


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    folder = tmp_path / "arrays"
    folder.mkdir()
    for index, sample in enumerate(iter(Reader().get_next, None)):
        np.save(folder / f"{index}.npy", sample["x"])
    return folder


def test_a_model_is_quantized(path: Path, arrays: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    words = f"onnx-ptq --input_model_path {path} --output_model_path {out} --calib_data_path {arrays}"
    more = " --config A8W8 --exclude_nodes head --cle --num_calib_data 5 --calib_method percentile+99.9"
    assert run((words + more).split()) == 0
    record = json.loads(out.with_suffix(".json").read_text())
    assert record["data"]["count"] == 5
    assert record["recipe"]["calibration"]["percentile"] == 99.9
    assert record["recipe"]["improve"]["equalize"]["enabled"]
    assert "l" in initializers(onnx.load(out))


def test_images_and_no_data(path: Path, tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for index in range(4):
        pixels = rng(index).integers(0, 255, (9, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(images / f"{index}.png")
    out = tmp_path / "out.onnx"
    words = ["onnx-ptq", "--input_model_path", str(path), "--output_model_path", str(out), "--config", "A8W8"]
    assert run([*words, "--calib_data_path", str(images), "--calib_image_dim", "8"]) == 0
    record = json.loads(out.with_suffix(".json").read_text())
    assert record["recipe"]["data"]["mean"] == [0.485, 0.456, 0.406]
    assert run(words) == 0
    assert json.loads(out.with_suffix(".json").read_text())["data"]["random"]


def test_what_cannot_be(path: Path, capsys) -> None:
    model = ["--input_model_path", str(path)]
    for words, said in (
        (["onnx-validate"], "roundel evaluate"),
        (["torch-llm-ptq"], "AMD Quark"),
        (["onnx-pt"], "Did you mean 'onnx-ptq'"),
        (["onnx-ptq", *model, "--calib_dataset_name", "pileval"], "not downloaded"),
        (["onnx-ptq", *model, "--calib_method", "mse"], "no method 'mse'"),
        (["onnx-ptq", *model, "--use_crypto"], "does not encrypt"),
    ):
        assert run(words) != 0
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["onnx-validate"])
    assert run(["--help"]) == 0
