"""The same inputs give the same bytes, whatever the number of threads and the order of sets."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from fuzzing.seeds import models

REAL = Path(__file__).parents[3] / "shared" / "models" / "cifar10_resnet20.onnx"
MODELS = {"convolutions": 0, "transformer": 2}
NAMES = (*MODELS, *((REAL.stem,) if REAL.is_file() else ()))
PRESETS = ("xint8", "a8w8", "a16w8", "bf16")
# All files of one setting in one process: starting Python takes longer than quantizing.
SCRIPT = """
import os, sys
from pathlib import Path
folder, cores, *presets = sys.argv[1:]
if cores == "1" and hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import roundel
for model in sorted(Path(folder).glob("*.onnx")):
    data = roundel.RandomData(count=6, ranges={"ids": (0, 30)} if "transformer" in model.name else {})
    for preset in presets:
        roundel.quantize(model, Path(folder) / preset / model.name, recipe=preset, data=data)
"""


def digests(folder: Path, threads: str, seed: str) -> dict[str, str]:
    """Of every file that a process with so many threads and that order of sets writes."""
    for name, index in MODELS.items():
        onnx.save(models()[index], folder / f"{name}.onnx")
    if REAL.stem in NAMES:
        shutil.copy(REAL, folder)
    for preset in PRESETS:
        (folder / preset).mkdir()
    counts = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads)
    environment = {**os.environ, **counts, "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", SCRIPT, str(folder), threads, *PRESETS]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    written = {f"{preset} {name}": folder / preset / f"{name}.onnx" for preset in PRESETS for name in NAMES}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in written.items()}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], dict[str, str]]:
    """One thread and one order of sets; two threads and another."""
    one = digests(tmp_path_factory.mktemp("one"), "1", "1")
    return one, digests(tmp_path_factory.mktemp("two"), "2", "4711")


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", NAMES)
def test_same_bytes(preset: str, name: str, both: tuple[dict[str, str], dict[str, str]]) -> None:
    one, two = both
    assert one[f"{preset} {name}"] == two[f"{preset} {name}"]
