"""A run that is killed while it fine-tunes, and the run that goes on from its checkpoint."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest

import roundel
from finetune_cases import conv_net, pictures

pytest.importorskip("torch")

_LAYERS = 4
_CHANGES = {"improve": {"finetune": {"iterations": 60}}}
# Kill -9 by its own hand, so that it always comes after the same layer.
_KILLED = """
import os, signal, sys
import roundel
from roundel.types import Silent

class Deadly(Silent):
    tuning = False

    def step(self, name, total=None):
        self.tuning = name.startswith("fine-tune")

    def advance(self, done):
        if self.tuning and done >= 2:
            os.kill(os.getpid(), signal.SIGKILL)

model, data, out, checkpoint = sys.argv[1:]
changes = {"improve": {"finetune": {"iterations": 60}}}
roundel.quantize(model, out, recipe="xint8", effort="high", data=data, changes=changes,
                 checkpoint=checkpoint, listener=Deadly())
"""


@dataclass(frozen=True, slots=True)
class Files:
    """A model, its data, what a whole run makes of it, and what a killed one left."""

    model: Path
    data: Path
    whole: bytes
    checkpoint: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("resume")
    model, data, out = folder / "net.onnx", folder / "x.npz", folder / "whole.onnx"
    onnx.save(conv_net(), model)
    np.savez(data, x=np.concatenate([sample["x"] for sample in pictures(24)]))
    roundel.quantize(model, out, recipe="xint8", effort="high", data=data, changes=_CHANGES)
    killed, checkpoint = folder / "killed.onnx", folder / "new" / "tuning"
    command = [sys.executable, "-c", _KILLED, *map(str, (model, data, killed, checkpoint))]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not killed.exists()
    return Files(model, data, out.read_bytes(), checkpoint)


@pytest.fixture
def checkpoint(files: Files, tmp_path: Path) -> Path:
    """A copy of what the killed run left, in a folder of its own."""
    return Path(shutil.copytree(files.checkpoint, tmp_path / "tuning"))


class _Heard:
    """Counts the layers that are really tuned."""

    def __init__(self) -> None:
        self.now, self.layers = "", set[float]()

    def step(self, name: str, total: int | None = None) -> None:
        self.now = name

    def advance(self, done: float) -> None:
        if self.now.startswith("fine-tune"):
            self.layers.add(done)

    def say(self, text: str) -> None:
        assert text.startswith("loss ")

    def close(self) -> None:
        pass


def test_killed_and_resumed_it_writes_the_same_file(files: Files, checkpoint: Path, tmp_path: Path) -> None:
    out, heard = tmp_path / "resumed.onnx", _Heard()
    result = roundel.quantize(
        files.model,
        out,
        recipe="xint8",
        effort="high",
        data=files.data,
        changes=_CHANGES,
        checkpoint=checkpoint,
        resume=True,
        listener=heard,
    )
    assert out.read_bytes() == files.whole
    assert max(heard.layers) == _LAYERS
    assert min(heard.layers) == 2, "what the killed run had done is not done again"
    tuning = result.record.improvements[-1]
    assert len(tuning.layers) == _LAYERS


def test_the_command_resumes(files: Files, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "resumed.onnx"
    words = ["quantize", files.model, "-o", out, "-p", "xint8", "--effort", "high", "--data", files.data]
    words += ["-s", "improve.finetune.iterations=60", "--checkpoint", checkpoint, "--resume", "-q"]
    subprocess.run([sys.executable, "-m", "roundel", *map(str, words)], check=True)
    assert out.read_bytes() == files.whole


@pytest.mark.parametrize(
    ("changes", "samples", "observed"),
    [
        ({"improve": {"finetune": {"iterations": 61}}}, 24, "another recipe"),
        ({"calibration": {"mode": "most_common"}, **_CHANGES}, 24, "another recipe"),
        (_CHANGES, None, "another set of samples"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    files: Files, checkpoint: Path, changes: dict[str, object], samples: int | None, observed: str
) -> None:
    data = pictures(24, seed=9) if samples is None else files.data
    with pytest.raises(roundel.DataError, match="belongs to another run") as raised:
        roundel.quantize(
            files.model,
            recipe="xint8",
            effort="high",
            data=data,
            changes=changes,
            checkpoint=checkpoint,
            resume=True,
        )
    assert raised.value.observed == observed
    assert str(raised.value.where).startswith(str(checkpoint))
    assert "run without resuming" in str(raised.value)


def test_without_resuming_a_checkpoint_is_replaced_and_nothing_else_is(
    files: Files, checkpoint: Path, tmp_path: Path
) -> None:
    settings = {"recipe": "xint8", "effort": "high", "data": files.data, "changes": _CHANGES}
    (checkpoint / "notes.txt").write_text("mine")
    (checkpoint / "finetune-000099.ckpt").write_bytes((checkpoint / "finetune-000000.ckpt").read_bytes())
    roundel.quantize(files.model, tmp_path / "anew.onnx", checkpoint=checkpoint, **settings)
    assert (tmp_path / "anew.onnx").read_bytes() == files.whole
    assert (checkpoint / "notes.txt").read_text() == "mine"
    assert not (checkpoint / "finetune-000099.ckpt").exists()
    (checkpoint / "photo.ckpt").write_text("not a checkpoint")
    with pytest.raises(roundel.OutputError, match="not a checkpoint"):
        roundel.quantize(files.model, checkpoint=checkpoint, **settings)
    assert (checkpoint / "photo.ckpt").exists()
    with pytest.raises(roundel.OutputError, match="cannot be used"):
        roundel.quantize(files.model, checkpoint=files.data, **settings)


def test_nothing_half_written_or_damaged_is_taken_up(files: Files, checkpoint: Path, tmp_path: Path) -> None:
    settings = {"recipe": "xint8", "effort": "high", "data": files.data, "changes": _CHANGES}
    whole = (checkpoint / "finetune-000001.ckpt").read_bytes()
    (checkpoint / "finetune-000001.ckpt").unlink()
    (checkpoint / ".finetune-000001.ckpt.partial").write_bytes(whole[: len(whole) // 2])
    out = tmp_path / "resumed.onnx"
    roundel.quantize(files.model, out, checkpoint=checkpoint, resume=True, **settings)
    assert out.read_bytes() == files.whole
    for broken in (whole[:-1], whole[:-9] + b"x" + whole[-8:], b""):
        (checkpoint / "finetune-000001.ckpt").write_bytes(broken)
        with pytest.raises(roundel.DataError, match="cannot be read"):
            roundel.quantize(files.model, checkpoint=checkpoint, resume=True, **settings)


def test_there_must_be_something_to_resume_from(files: Files) -> None:
    with pytest.raises(roundel.RecipeError, match="nothing to resume from"):
        roundel.quantize(files.model, recipe="xint8", effort="high", data=files.data, resume=True)
    with pytest.raises(roundel.RecipeError, match="wrong") as refused:
        roundel.load_recipe("xint8_plain", {"improve": {"finetune": {"algorithm": "adaround"}}})
    assert "effort fast or high" in str(refused.value.expected)
