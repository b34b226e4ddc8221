"""Checkpoint files: what goes in comes out, and nothing but the whole does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from roundel.errors import DataError, OutputError
from roundel.work import checkpoints
from roundel.work.checkpoints import as_array, as_tree, open_store

ARRAYS = {
    "a": np.arange(6, dtype=np.int64).reshape(2, 3),
    "scalar": np.array(1.5, np.float32),
    "nothing": np.zeros((0, 4), np.float64),
    "short/ünd.strange": np.array([1.5, -2.0], ml_dtypes.bfloat16),
    "flag": np.array(True),
    "words": np.array([["a", "é"]], dtype=object),
    "not finite": np.array([np.inf, -np.inf, np.nan]),
    "big": np.zeros(70_000, np.int64),
}


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    checkpoints.write_checkpoint(path, {"key": {"model": "abc"}}, ARRAYS)
    header, arrays = checkpoints.read_checkpoint(path)
    assert header == {"key": {"model": "abc"}}
    assert list(arrays) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        assert arrays[name].shape == array.shape
        if array.dtype == object:
            assert arrays[name].tolist() == array.tolist()
        else:
            assert arrays[name].tobytes() == array.tobytes()
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_size < 4000, "zeros take no room"


def test_plain_values_come_back() -> None:
    tree = {"a": [1, 2.5, None, "é"], "b": float("inf")}
    assert as_tree(as_array(tree)) == tree


def test_every_damage_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    checkpoints.write_checkpoint(path, {}, {"a": np.arange(50)})
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(DataError, match="cannot be read"):
            checkpoints.read_checkpoint(path)
        path.write_bytes(whole[:place])
        with pytest.raises(DataError, match="cannot be read"):
            checkpoints.read_checkpoint(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(DataError, match="cannot be read"):
        checkpoints.read_checkpoint(path)


def test_a_kill_while_writing_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    script = f"""
import numpy as np
from pathlib import Path
from roundel.work import checkpoints as files
noise = np.random.default_rng(0).integers(0, 255, 3_000_000).astype(np.uint8)
for number in range(10_000):
    files.write_checkpoint(Path({str(path)!r}), {{"number": number}}, {{"a": noise + np.uint8(number % 256)}})
"""
    noise = np.random.default_rng(0).integers(0, 255, 3_000_000).astype(np.uint8)
    writer = subprocess.Popen([sys.executable, "-c", script])
    while not path.exists():
        assert writer.poll() is None, "the writer failed"
        time.sleep(0.01)
    for pause in (0.0, 0.013, 0.031, 0.057):
        time.sleep(pause)
        os.kill(writer.pid, signal.SIGSTOP)  # as far as any reader can tell, this is a kill
        header, arrays = checkpoints.read_checkpoint(path)
        np.testing.assert_array_equal(arrays["a"], noise + np.uint8(header["number"] % 256))
        os.kill(writer.pid, signal.SIGCONT)
    writer.kill()
    writer.wait()
    checkpoints.read_checkpoint(path)


def test_only_a_folder_that_can_be_used(tmp_path: Path) -> None:
    assert open_store(None, resume=False) is None
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be used"):
        open_store(tmp_path / "file", resume=True)
    store = open_store(tmp_path / "new" / "folder", resume=True)
    assert store is not None
    assert store.folder.is_dir()
