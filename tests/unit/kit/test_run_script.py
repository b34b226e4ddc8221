"""The kit's run.py as its users run it: in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from roundel.example import load_example
from roundel.kit import deploy

from .conftest import qdq_model, saved

# Pretends to be AMD's build of ONNX Runtime: takes the NPU's options, writes them down, and a report.
STAND_IN = """
import json, os
from pathlib import Path
import numpy as np

__version__ = "0.stand-in"

class Spec:
    name, type, shape = "x", "tensor(float)", [1, 2, 4, 4]

class InferenceSession:
    def __init__(self, model, providers):
        self.providers = [p if isinstance(p, str) else p[0] for p in providers]
        Path("seen.json").write_text(json.dumps(providers))
        if isinstance(providers[0], tuple) and "XLNX_ONNX_EP_REPORT_FILE" in os.environ:
            options = providers[0][1]
            folder = Path(options["cache_dir"]) / options["cache_key"]
            folder.mkdir(parents=True)
            (folder / os.environ["XLNX_ONNX_EP_REPORT_FILE"]).write_text("{}")
        if os.environ.get("DROPPED"):
            self.providers = ["CPUExecutionProvider"]
    def get_providers(self): return self.providers
    def get_inputs(self): return [Spec]
    def get_outputs(self): return [Spec]
    def run(self, names, feed): return [feed["x"]]

def get_available_providers(): return ["VitisAIExecutionProvider", "CPUExecutionProvider"]
"""


def run(kit: Path, *words: object, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **env}
    environment.pop("XLNX_ONNX_EP_REPORT_FILE", None)
    command = [sys.executable, str(kit / "run.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, check=False)


@pytest.fixture(scope="module")
def kit(a8w8: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kits") / "a kit"
    deploy(a8w8, folder)
    return folder


@pytest.fixture
def npu(tmp_path: Path) -> dict[str, str]:
    """The environment in which the provider seems to be there."""
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "onnxruntime.py").write_text(STAND_IN)
    return {"PYTHONPATH": str(tmp_path / "fake")}


def stand_in_kit(tmp_path: Path, device: str) -> Path:
    deploy(saved(qdq_model(), tmp_path / "m.onnx"), tmp_path / "kit", device=device)
    return tmp_path / "kit"


def test_random_input_falls_back_to_the_cpu(kit: Path, tmp_path: Path) -> None:
    done = run(kit, "--random", "--iterations", 3, "--report", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Falling back to CPUExecutionProvider" in done.stderr
    assert "only the NPU provider writes one" in done.stderr
    assert "session: CPUExecutionProvider" in done.stdout
    assert "output logits: float32 [1, 10]" in done.stdout
    assert "top-5:" in done.stdout
    assert "(3 runs)" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_it_needs_nothing_of_roundel(kit: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(kit, tmp_path / "elsewhere")
    assert "roundel" not in (moved / "run.py").read_text().replace("roundel npu-report", "")
    assert run(moved, cwd=tmp_path, PYTHONPATH="").returncode == 0


def test_saved_outputs_are_those_of_the_model(kit: Path, a8w8: Path, tmp_path: Path) -> None:
    import onnxruntime as ort

    image = load_example().eval_x[:1]
    np.save(tmp_path / "x.npy", image)
    done = run(kit, "--input", "x.npy", "--save", "y.npz", "--cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    wanted = ort.InferenceSession(a8w8, providers=["CPUExecutionProvider"]).run(None, {"image": image})
    with np.load(tmp_path / "y.npz") as saved_outputs:
        np.testing.assert_array_equal(saved_outputs["logits"], wanted[0])


def test_npz_a_missing_batch_axis_and_another_type(kit: Path, tmp_path: Path) -> None:
    image = load_example().eval_x[0].astype(np.float64)
    np.savez(tmp_path / "x.npz", image=image)
    assert run(kit, "--input", "x.npz", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((1, 3, 16, 16), np.float32), "has shape [1, 3, 16, 16]"),
        (np.zeros((16,), np.float32), "has shape [16]"),
    ],
)
def test_wrong_shapes_are_told(kit: Path, tmp_path: Path, array: np.ndarray, message: str) -> None:
    np.save(tmp_path / "x.npy", array)
    done = run(kit, "--input", "x.npy", cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr


def test_wrong_names_missing_files_and_pickles_are_told(kit: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", picture=np.zeros((1, 1, 16, 16), np.float32))
    assert "['image']" in run(kit, "--input", "x.npz", cwd=tmp_path).stderr
    assert "cannot read" in run(kit, "--input", "none.npy", cwd=tmp_path).stderr
    np.save(tmp_path / "p.npy", np.array([{}], dtype=object), allow_pickle=True)
    assert "cannot read" in run(kit, "--input", "p.npy", cwd=tmp_path).stderr


def test_required_npu(kit: Path, tmp_path: Path) -> None:
    done = run(kit, "--require-npu", cwd=tmp_path)
    assert done.returncode == 2
    assert "not available" in done.stderr


def test_no_iterations(kit: Path, tmp_path: Path) -> None:
    assert run(kit, "--iterations", 0, cwd=tmp_path).returncode == 2


def test_on_the_npu(tmp_path: Path, npu: dict[str, str]) -> None:
    folder = stand_in_kit(tmp_path, "stx")
    done = run(folder, "--report", "--require-npu", cwd=tmp_path, **npu)
    assert done.returncode == 0, done.stderr
    assert "session: VitisAIExecutionProvider" in done.stdout
    (name, options), fallback = json.loads((tmp_path / "seen.json").read_text())
    assert (name, fallback) == ("VitisAIExecutionProvider", "CPUExecutionProvider")
    assert options["target"] == "X2"
    assert options["cache_dir"] == str(folder / "cache")
    report = folder / "cache" / options["cache_key"] / "vitisai_ep_report.json"
    assert f"roundel npu-report '{report}'" in done.stdout


def test_cpu_although_there_is_an_npu(tmp_path: Path, npu: dict[str, str]) -> None:
    run(stand_in_kit(tmp_path, "stx"), "--cpu", cwd=tmp_path, **npu)
    assert json.loads((tmp_path / "seen.json").read_text()) == ["CPUExecutionProvider"]


def test_a_dropped_provider_is_told(tmp_path: Path, npu: dict[str, str]) -> None:
    folder = stand_in_kit(tmp_path, "stx")
    assert "Everything runs on the CPU" in run(folder, cwd=tmp_path, DROPPED="1", **npu).stderr
    assert run(folder, "--require-npu", cwd=tmp_path, DROPPED="1", **npu).returncode == 2


def test_xclbin_only_where_it_belongs(tmp_path: Path, npu: dict[str, str]) -> None:
    done = run(stand_in_kit(tmp_path, "stx"), "--xclbin", "a.xclbin", cwd=tmp_path, **npu)
    assert done.returncode == 2
    assert "must not be set" in done.stderr


def test_phoenix_finds_its_binary(tmp_path: Path, npu: dict[str, str]) -> None:
    folder = stand_in_kit(tmp_path, "phx")
    missing = run(folder, cwd=tmp_path, **npu)
    assert missing.returncode == 2
    assert "--xclbin PATH" in missing.stderr
    binary = tmp_path / "voe-4.0-win_amd64" / "xclbins" / "phoenix" / "4x4.xclbin"
    binary.parent.mkdir(parents=True)
    binary.write_text("")
    for words, env in (
        ((), {"RYZEN_AI_INSTALLATION_PATH": str(tmp_path)}),
        ((), {"ROUNDEL_XCLBIN": str(binary)}),
        (("--xclbin", binary), {}),
    ):
        done = run(folder, *words, cwd=tmp_path, **npu, **env)
        assert done.returncode == 0, done.stderr
        options = json.loads((tmp_path / "seen.json").read_text())[0][1]
        assert Path(options["xclbin"]) == binary
        assert options["xlnx_enable_py3_round"] == "0"
