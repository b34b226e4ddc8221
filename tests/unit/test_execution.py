"""--device-exec: a GPU where there is one, an error where it is missing, never the CPU without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from typer.testing import CliRunner

import roundel
from helpers import feeds
from roundel import result
from roundel.cli.app import app
from roundel.errors import DependencyError, RecipeError
from roundel.model import session
from roundel.recipe.load import load_recipe
from roundel.result import choose_execution
from script_cases import SHAPE, network

LACKING = "this ONNX Runtime has no CUDA provider"


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result, "runtime_has_cuda", lambda: False)
    monkeypatch.setattr(result, "_torch_lacks", lambda: "torch sees no CUDA device")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result, "runtime_has_cuda", lambda: True)
    monkeypatch.setattr(result, "_torch_lacks", lambda: None)


def test_cuda_is_missing(no_gpu: None, tmp_path: Path) -> None:
    onnx.save(network(), tmp_path / "float.onnx")
    command = ["quantize", str(tmp_path / "float.onnx"), "-o", str(tmp_path / "out.onnx"), "--random", "2"]
    with pytest.raises(DependencyError) as caught:
        roundel.quantize(network(), data=feeds({"x": SHAPE}, 2), device_exec="cuda")
    assert LACKING in str(caught.value.observed)
    assert "onnxruntime-gpu" in str(caught.value.hint)
    done = CliRunner().invoke(app, [*command, "--device-exec", "cuda"])
    assert isinstance(done.exception, DependencyError)
    assert not (tmp_path / "out.onnx").exists()
    done = CliRunner().invoke(app, [*command, "--device-exec", "auto"])
    assert done.exit_code == 0, done.output
    assert "calibration on cpu (this ONNX Runtime has no CUDA provider" in " ".join(done.output.split())


def test_tuning_needs_torch_with_cuda(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result, "_torch_lacks", lambda: "this torch is built without CUDA")
    tuned, plain = load_recipe("a8w8_adaround"), load_recipe("a8w8")
    with pytest.raises(DependencyError, match="fine-tuning cannot use it"):
        choose_execution("cuda", tuned)
    assert choose_execution("cuda", plain).calibration == 0
    taken = choose_execution("auto", tuned)
    assert taken.recipe.improve.finetune.optim_device == "cpu"
    assert taken.recipe.improve.finetune.infer_device == "cuda"
    assert taken.notes == (
        "--device-exec auto: calibration on cuda, fine-tuning on cpu (this torch is built without CUDA)",
    )


def test_the_cpu_can_be_asked_for(gpu: None) -> None:
    asked = load_recipe("a8w8_adaround", {"improve": {"finetune": {"optim_device": "cuda"}}})
    taken = choose_execution("cpu", asked)
    assert taken.calibration is None
    assert taken.recipe.improve.finetune.optim_device == "cpu"
    assert choose_execution(None, asked).recipe is asked
    with pytest.raises(RecipeError, match="Unknown place"):
        choose_execution("gpu", asked)


def test_sessions_of_the_calibration_move(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    monkeypatch.setattr("roundel.model.session.move_to_cuda", lambda session, device: moved.append(device))
    result = roundel.quantize(
        network(), data=feeds({"x": SHAPE}, 2), device_exec="cuda", recipe="a8w8_minmax"
    )
    assert moved == [0]
    assert "--device-exec cuda: calibration on cuda" in result.record.notes


def test_a_session_that_stays_on_the_cpu_is_an_error() -> None:
    class Session:
        def set_providers(self, names: list[str], options: list[Any]) -> None:
            assert names[0] == "CUDAExecutionProvider"
            assert options[0] == {"device_id": "1", "use_tf32": "0"}

        def get_providers(self) -> list[str]:
            return ["CPUExecutionProvider"]

    with pytest.raises(DependencyError, match="could not use the GPU"):
        session.move_to_cuda(Session(), 1)  # type: ignore[arg-type]
