"""The documents' way to measure accuracy, command for command, on the embedded example.

1. quantize; 2. "infer float32 and a8w8/a16w8 quantized models and save results"; 3. "calculate differences".
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from roundel.cli import main
from roundel.example import load_example

Shell = Callable[[str], str]


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Shell:
    """Runs one line of the documents as it stands there, with `roundel` for the tool's name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(command: str) -> str:
        monkeypatch.setattr(sys, "argv", command.split())
        with pytest.raises(SystemExit) as leaving:
            main()
        shown = capsys.readouterr()
        assert not leaving.value.code, shown.err
        return shown.out

    return run


def infer_model_and_save_output(model: str, inputs: list[np.ndarray], output_dir: Path) -> None:
    """As the documents' own script does it."""
    session = ort.InferenceSession(model)
    output_dir.mkdir()
    for index, data in enumerate(inputs):
        result = session.run(None, {session.get_inputs()[0].name: data})
        np.save(output_dir / f"{index}.npy", result[0])


@pytest.mark.parametrize("preset", ["a8w8", "a16w8"])
def test_the_documents_flow(preset: str, shell: Shell, tmp_path: Path) -> None:
    example = load_example()
    (tmp_path / "calib").mkdir()
    (tmp_path / "images").mkdir()
    for index, sample in enumerate(example.calibration[:32]):
        np.save(tmp_path / "calib" / f"{index}.npy", sample["image"])
    inputs = [example.eval_x[i : i + 1] for i in range(20)]
    for index, image in enumerate(inputs):
        np.save(tmp_path / "images" / f"{index}.npy", image)
    model = example.model_path
    shell(f"roundel quantize {model} -o quantized.onnx --preset {preset} --data calib")
    shell(f"roundel infer {model} --data images --out baseline_results")
    shell("roundel infer quantized.onnx --data images --out quantized_results")
    table = shell(
        "roundel evaluate --baseline_results_folder baseline_results"
        " --quantized_results_folder quantized_results --csv scores.csv"
    )
    for word in ("cosine", "L2", "PSNR", "mean", "worst", "19.npy"):
        assert word in table
    # What the documents' own script saves is the same, and can take the place of `roundel infer`.
    infer_model_and_save_output(str(model), inputs, tmp_path / "by_script")
    for index in range(20):
        ours = np.load(tmp_path / "baseline_results" / f"{index}.npy")
        theirs = np.load(tmp_path / "by_script" / f"{index}.npy")
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    again = shell("roundel evaluate by_script quantized_results --csv again.csv")
    assert again.splitlines()[0] == table.splitlines()[0]
    rows = np.genfromtxt(tmp_path / "scores.csv", delimiter=",", names=True, dtype=None, encoding="utf-8")
    floor = 0.97 if preset == "a8w8" else 0.98
    assert rows["cosine"].min() > floor
    assert len(rows) == 20
