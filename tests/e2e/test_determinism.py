"""The same inputs give the same bytes, whatever the number of threads and the order of sets."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from fuzzing.seeds import models

SCRIPT = """
import sys
from pathlib import Path
import roundel
model, out, preset, cores = sys.argv[1:]
if cores == "1" and hasattr(__import__("os"), "sched_setaffinity"):
    import os
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
data = roundel.RandomData(count=6, ranges={"ids": (0, 30)} if "transformer" in model else {})
roundel.quantize(model, out, recipe=preset, data=data)
"""


def digest(model: Path, out: Path, preset: str, threads: str, seed: str) -> str:
    counts = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads)
    environment = {**os.environ, **counts, "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", SCRIPT, str(model), str(out), preset, threads]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return hashlib.sha256(out.read_bytes()).hexdigest()


RESNET = Path(__file__).parents[3] / "shared" / "models" / "cifar10_resnet20.onnx"


@pytest.mark.parametrize("preset", ["xint8", "a8w8", "bf16"])
@pytest.mark.parametrize(("name", "index"), [("convolutions", 0), ("transformer", 2)])
def test_same_bytes(preset: str, name: str, index: int, tmp_path: Path) -> None:
    model = tmp_path / f"{name}.onnx"
    onnx.save(models()[index], model)
    one = digest(model, tmp_path / "one.onnx", preset, "1", "1")
    two = digest(model, tmp_path / "two.onnx", preset, "2", "4711")
    assert one == two


@pytest.mark.shared
@pytest.mark.skipif(not RESNET.is_file(), reason="needs the shared models")
@pytest.mark.parametrize("preset", ["a8w8", "a16w8"])
def test_same_bytes_of_a_real_model(preset: str, tmp_path: Path) -> None:
    one = digest(RESNET, tmp_path / "one.onnx", preset, "1", "1")
    two = digest(RESNET, tmp_path / "two.onnx", preset, "2", "4711")
    assert one == two
