"""Models that are larger than the memory they may take: each run is a process with a limit of its own.

The limit is RLIMIT_DATA: it counts what is allocated, and what ONNX Runtime maps privately. RLIMIT_AS would
count every mapping of the weights' file, although its pages are the system's to drop.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from large_models import matmul_stack

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits memory by RLIMIT_DATA")

_RUN = """
import json, resource, sys
import numpy as np
import roundel
model, out, limit, width, options = sys.argv[1], sys.argv[2], *map(json.loads, sys.argv[3:])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
rng = np.random.default_rng(1)
data = [{"x": rng.standard_normal((1, width), dtype=np.float32)} for _ in range(2)]
result = roundel.quantize(model, out, recipe="a8w8", effort="none", data=data, **options)
print(json.dumps({"sqnr": result.record.outputs[0].sqnr_db}))
"""


def quantized(
    model: Path, out: Path, limit: int, width: int, **options: Any
) -> subprocess.CompletedProcess[str]:
    """A process that may allocate `limit` bytes."""
    words = [str(model), str(out), *(json.dumps(value) for value in (limit, width, options))]
    command = [sys.executable, "-c", _RUN, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)


def check_file(path: Path, width: int, layers: int) -> None:
    """It loads in a plain session, gives numbers, and its weights are 8-bit codes."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": np.ones((1, width), np.float32)})
    assert y.shape == (1, width)
    assert np.isfinite(y).all()
    graph = onnx.load(path, load_external_data=False).graph
    codes = [t for t in graph.initializer if t.data_type == onnx.TensorProto.INT8 and len(t.dims) == 2]
    assert len(codes) == layers


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("external", [False, True])
def test_three_gigabytes_within_four(tmp_path: Path, external: bool) -> None:
    layers, width = 45, 4096
    model = matmul_stack(tmp_path / "stack.onnx", layers, width)
    changes = {"output": {"external_data": external}}
    done = quantized(model, tmp_path / "out.onnx", 4 * 10**9, width, changes=changes)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1])["sqnr"] > 15
    check_file(tmp_path / "out.onnx", width, layers)


def test_three_hundred_megabytes_within_as_many_more(tmp_path: Path) -> None:
    """The small sibling: with `max_memory`, a run that would not fit does, and gives a model as good."""
    layers, width = 18, 2048
    model = matmul_stack(tmp_path / "stack.onnx", layers, width)
    limit = 520 * 10**6  # 300 MB are mapped privately by ONNX Runtime, and count
    done = quantized(model, tmp_path / "out.onnx", limit, width)
    assert done.returncode != 0, "the limit is too high to show anything"
    done = quantized(model, tmp_path / "out.onnx", limit, width, max_memory="350M")
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1])["sqnr"] > 15
    check_file(tmp_path / "out.onnx", width, layers)
