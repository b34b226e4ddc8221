"""The kit knows how pictures become input: from the record beside the model, or from the user's words."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

import roundel
from roundel.data.images import plan_images
from roundel.example import load_example
from roundel.options import DataWords, data_settings
from roundel.types import InputSpec

WORDS: tuple[tuple[DataWords, tuple[int | str, ...]], ...] = (
    ({"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "resize": 40, "crop": 32}, (1, 3, 32, 32)),
    ({"mean": 0.5, "std": 0.25}, (1, 3, 24, 48)),
    ({"scale": "raw", "bgr": True, "letterbox": True}, (1, 48, 32, 3)),
    ({"mean": 127.5, "std": 127.5, "scale": "raw", "resize": (20, 30)}, (1, 1, 20, 30)),
    ({"resize": 33, "layout": "nhwc"}, ("n", 33, 33, 3)),
)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(3)
    for number, size in enumerate([(50, 71, 3), (64, 41, 3), (40, 40, 3), (60, 45)]):
        PIL.Image.fromarray(rng.integers(0, 256, size, np.uint8)).save(folder / f"{number}.png")
    PIL.Image.fromarray(rng.integers(0, 256, (55, 48, 3), np.uint8)).save(folder / "4.jpg")
    return folder


@pytest.fixture(scope="module")
def made(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was calibrated on the pictures, with its record, for Krackan."""
    file = tmp_path_factory.mktemp("made") / "q.onnx"
    words: dict[str, Any] = {"mean": 0.5, "std": 0.5, "device": "krk"}
    roundel.quantize(load_example().model_path, file, preset="a8w8_minmax", data=pictures, **words)
    return file


def script() -> Any:
    source = Path(roundel.__file__).parent / "kit" / "run.py.txt"
    loader = importlib.machinery.SourceFileLoader("kit_run_script", str(source))
    spec = importlib.util.spec_from_loader("kit_run_script", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(("words", "shape"), WORDS)
def test_the_script_prepares_as_calibration_did(
    words: DataWords, shape: tuple[int | str, ...], pictures: Path
) -> None:
    plan = plan_images(data_settings(None, words), [InputSpec("x", np.dtype(np.float32), shape)])
    how = json.loads(json.dumps(plan.settled()))
    for file in sorted(pictures.iterdir()):
        assert np.array_equal(script().preprocessed(file, how), plan.read(file)), file.name


def test_a_kit_takes_pictures_as_the_run_did(made: Path, pictures: Path, tmp_path: Path) -> None:
    kit = roundel.deploy(made, tmp_path / "kit")
    assert kit.device == "krk", "the run's device"
    words = [sys.executable, tmp_path / "kit" / "run.py", "--cpu", "--image"]
    done = subprocess.run([*words, pictures / "4.jpg", "--save", "o.npz"], cwd=tmp_path, check=True)
    assert done.returncode == 0
    expected = roundel.infer(made, pictures / "4.jpg", tmp_path / "out").files
    assert np.array_equal(
        np.load(tmp_path / "o.npz")["logits"][0], np.load(tmp_path / "out" / expected[0])[0]
    )
    told = subprocess.run([*words, pictures], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert told.count("top-5") == 5
    assert "(5 runs)" in told


def test_words_of_the_user_win(made: Path, tmp_path: Path) -> None:
    roundel.deploy(made, tmp_path / "kit", device="stx", mean=0.25)
    told = json.loads((tmp_path / "kit" / "preprocessing.json").read_text())
    assert (told["mean"], told["std"]) == ([0.25], [0.5])


def test_without_a_word_about_pictures_the_script_says_so(made: Path, pictures: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.onnx"
    plain.write_bytes(made.read_bytes())
    kit = roundel.deploy(plain, tmp_path / "kit")
    assert kit.device == "stx"
    assert "preprocessing.json" not in kit.files
    words = [sys.executable, tmp_path / "kit" / "run.py", "--cpu", "--image", pictures]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "deploy again with --mean" in done.stderr
