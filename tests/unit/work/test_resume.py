"""Commands that are killed, and go on where they were."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import roundel
from finetune_cases import conv_net, pictures
from roundel.errors import DataError
from roundel.work.checkpoints import Memory

# Kill -9 by its own hand, at the same place of the work each time.
_KILLED = """
import os, signal, sys
import roundel
from roundel.types import Silent

class Deadly(Silent):
    now = ""

    def step(self, name, total=None):
        self.now = name

    def advance(self, done):
        if self.now.startswith(sys.argv[2]) and done >= float(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)

place = {"checkpoint": "memory", "resume": True, "listener": Deadly()}
model, quantized, data = "net.onnx", "q.onnx", "x.npz"
calls = {
    "calibrate": lambda: roundel.quantize(model, "out.onnx", recipe="xint8_plain", data=data, **place),
    "round": lambda: roundel.quantize(model, "out.onnx", recipe="xint8", data=data, **place),
    "compare": lambda: roundel.compare(model, quantized, data, **place),
    "evaluate": lambda: roundel.evaluate_models([model, quantized], data, **place),
    "sensitivity": lambda: roundel.sensitivity(model, recipe="xint8_plain", data=data, **place),
}
calls[sys.argv[1]]()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("resume")
    onnx.save(conv_net(), home / "net.onnx")
    np.savez(home / "x.npz", x=np.concatenate([sample["x"] for sample in pictures(40)]))
    roundel.quantize(home / "net.onnx", home / "q.onnx", recipe="xint8_plain", data=home / "x.npz")
    return home


def _result(command: str, folder: Path, out: Path, **place: Any) -> object:
    model, quantized, data = folder / "net.onnx", folder / "q.onnx", folder / "x.npz"
    if command in ("calibrate", "round"):
        recipe = "xint8_plain" if command == "calibrate" else "xint8"
        roundel.quantize(model, out, recipe=recipe, data=data, **place)
        return out.read_bytes()
    if command == "compare":
        trees = [roundel.compare(model, quantized, data, **place).to_dict()]
    elif command == "evaluate":
        trees = [score.to_dict() for score in roundel.evaluate_models([model, quantized], data, **place)]
    else:
        trees = [roundel.sensitivity(model, recipe="xint8_plain", data=data, **place).to_dict()]
    return [{key: value for key, value in tree.items() if key != "seconds"} for tree in trees]


@pytest.mark.parametrize(
    ("command", "step", "when", "left"),
    [
        ("calibrate", "calibrate", 16, "calibrate-000001"),
        ("round", "round", 2, "rounding-000001"),
        ("compare", "compare", 24, "compare-000002"),
        ("evaluate", "evaluate", 17, "evaluate-000001"),
        ("sensitivity", "measure", 2, "layers-000001"),
    ],
)
def test_killed_and_resumed_the_result_is_the_same(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    step: str,
    when: int,
    left: str,
) -> None:
    for name in ("net.onnx", "q.onnx", "q.json", "x.npz"):
        (tmp_path / name).symlink_to(folder / name)
    words = [sys.executable, "-c", _KILLED, command, step, str(when)]
    assert subprocess.run(words, cwd=tmp_path, check=False).returncode == -signal.SIGKILL
    assert not (tmp_path / "out.onnx").exists()
    known = {path.stem for path in (tmp_path / "memory").iterdir()}
    assert left in known
    taken, load = [], Memory.load

    def watched(self: Memory, part: int | str, digest: str = "") -> Any:
        found = load(self, part, digest)
        taken.extend(
            [f"{self.step}-{part:06d}" if isinstance(part, int) else f"{self.step}-{part}"]
            * (found is not None)
        )
        return found

    monkeypatch.setattr(Memory, "load", watched)
    again = _result(command, folder, tmp_path / "out.onnx", checkpoint=tmp_path / "memory", resume=True)
    assert set(taken) == known, "all that was done is taken over, and nothing else is there"
    assert again == _result(command, folder, tmp_path / "whole.onnx")


def test_other_data_and_other_models_are_refused(folder: Path, tmp_path: Path) -> None:
    model, quantized = folder / "net.onnx", folder / "q.onnx"
    first, other = pictures(20), pictures(20, seed=6)
    place: dict[str, Any] = {"checkpoint": tmp_path, "resume": True}
    roundel.compare(model, quantized, first, **place)
    with pytest.raises(DataError, match="another run") as raised:
        roundel.compare(model, quantized, other, **place)
    assert raised.value.observed == "another set of samples"
    changed = onnx.load(quantized)
    scale = next(t for t in changed.graph.initializer if t.name.endswith("scale"))
    scale.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(scale) * 2, scale.name))
    with pytest.raises(DataError, match="another run") as raised:
        roundel.compare(model, changed, first, **place)
    assert raised.value.observed == "another quantized model"


def test_the_executor_and_the_memory_work_together(folder: Path, tmp_path: Path) -> None:
    place: dict[str, Any] = {"checkpoint": tmp_path / "memory", "resume": True}
    where = roundel.executor("processes", workers=2)
    whole = _result("calibrate", folder, tmp_path / "a.onnx")
    assert _result("calibrate", folder, tmp_path / "b.onnx", executor=where, **place) == whole
    assert len(list((tmp_path / "memory").glob("calibrate-*.ckpt"))) == 5
    assert _result("calibrate", folder, tmp_path / "c.onnx", **place) == whole


def test_the_kill_loop(folder: Path, tmp_path: Path) -> None:
    """Three random moments; `scripts/kill_loop.py` takes any number."""
    pytest.importorskip("torch")
    script = Path(__file__).parents[3] / "scripts" / "kill_loop.py"
    options = ["-p", "xint8", "--effort", "high", "-s", "improve.finetune.iterations=60"]
    words = [script, folder / "net.onnx", folder / "x.npz", "--kills", "3", "--json", tmp_path / "kills.json"]
    subprocess.run([sys.executable, *map(str, words), "--", *options], check=True)
    kills = json.loads((tmp_path / "kills.json").read_text())["kills"]
    assert [kill["identical"] for kill in kills] == [True] * 3
