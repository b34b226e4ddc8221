"""Every Python block of the documents, extracted from their text, runs and gives a verified model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from script_cases import Reader, network

DOCUMENTS = Path(__file__).parents[3] / "shared" / "spec" / "documents"
RUNNER = Path(__file__).parent / "document_blocks.py"
# By document: how many blocks there are, and how many of them give a model.
EXPECTED = {"000": (1, 1), "001": (1, 1), "002": (4, 3), "003": (2, 2), "004": (4, 3)}
pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not DOCUMENTS.is_dir(), reason="no ../shared/spec/documents on this machine"),
]


@pytest.mark.parametrize("name", EXPECTED)
def test_every_block_runs_and_its_model_holds(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="some blocks fine-tune")
    (document,) = DOCUMENTS.glob(f"{name}_*.txt")
    onnx.save(network(), tmp_path / "float.onnx")
    done = subprocess.run(
        [sys.executable, "-m", "roundel.quark", str(RUNNER), str(document), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    blocks, models = EXPECTED[name]
    # A line of its own for each block; the summary's table has a layer of that name, too.
    assert len(re.findall(r"^block \d+: ", done.stdout, re.MULTILINE)) == blocks, done.stdout
    written = sorted(tmp_path.glob("[0-9]*.onnx"))
    assert len(written) == models
    sample = Reader(1).get_next()
    expected = ort.InferenceSession(str(tmp_path / "float.onnx")).run(None, sample)[0]
    for path in written:
        model = onnx.load(path)
        onnx.checker.check_model(model)
        kinds = {node.op_type for node in model.graph.node}
        assert kinds & {"QuantizeLinear", "ExtendedQuantizeLinear", "Cast"}, "nothing is quantized"
        got = ort.InferenceSession(str(path)).run(None, sample)[0]
        assert np.corrcoef(expected.ravel(), got.ravel())[0, 1] > 0.95
    if name == "002":
        assert len(list((tmp_path / "baseline_results").glob("*.npy"))) == 6
