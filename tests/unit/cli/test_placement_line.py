"""Where a model will run, said by default: after a run, by inspect, on the report, and what would help."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

import roundel
from roundel.cli.app import app
from roundel.rules import check
from roundel.rules.report import finished, placed, placement


def _clipped() -> onnx.ModelProto:
    """Three Conv with a ReLU6 behind each, which compiler X2 leaves to the CPU, and one without."""
    rng = np.random.default_rng(7)
    nodes, weights, x = [], [], "x"
    bounds = {"low": np.float32(0), "high": np.float32(6)}
    for number in range(4):
        weights.append(
            numpy_helper.from_array(rng.standard_normal((8, 8, 3, 3), np.float32) / 8, f"w{number}")
        )
        shape = {"kernel_shape": [3, 3], "pads": [1] * 4, "strides": [1, 1], "dilations": [1, 1], "group": 1}
        nodes.append(
            helper.make_node("Conv", [x, f"w{number}"], [f"c{number}"], name=f"conv{number}", **shape)
        )
        x = f"c{number}"
        if number < 3:
            nodes.append(helper.make_node("Clip", [x, *bounds], [f"r{number}"], name=f"clip{number}"))
            x = f"r{number}"
    weights += [numpy_helper.from_array(np.asarray(value), name) for name, value in bounds.items()]
    ins, outs = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 8, 16, 16])] for name in ("x", "c3")
    )
    graph = helper.make_graph(nodes, "g", ins, outs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("placed")
    onnx.save(_clipped(), folder / "m.onnx")
    np.save(folder / "data.npy", np.random.default_rng(3).standard_normal((8, 8, 16, 16), np.float32))
    return folder


def _call(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def _quantized(home: Path, name: str, *words: str) -> tuple[dict[str, Any], str]:
    out = home / name
    text = _call("quantize", home / "m.onnx", "-o", out, "--data", home / "data.npy", "-p", "a8w8", *words)
    return json.loads(out.with_suffix(".json").read_text()), " ".join(text.split())


def test_a_run_without_a_device_ends_with_the_fix(home: Path) -> None:
    record, text = _quantized(home, "plain.onnx")
    assert record["npu"]["npu_share_of_macs"] < 0.5
    assert record["npu"]["fix"]["option"] == "--device stx"
    assert record["npu"]["fix"]["share"] == 1.0
    assert "To get more there: quantize with --device stx: 100.0%" in text
    words = shlex.split(record["verdict"]["next"])
    assert words[-2:] == ["--device", "stx"]
    _call(*words[1:])
    again = json.loads((home / "plain.stx.json").read_text())
    assert again["npu"]["npu_share_of_macs"] == 1.0, "the command does what its line promised"
    assert again["npu"]["fix"] is None


def test_with_the_device_nothing_is_left_to_fix(home: Path) -> None:
    record, text = _quantized(home, "stx.onnx", "--device", "stx")
    assert record["npu"]["npu_share_of_macs"] == 1.0
    assert "To get more there" not in text


def test_a_device_that_is_taken_to_be_another(home: Path) -> None:
    record, text = _quantized(home, "krk.onnx", "--device", "krk")
    assert record["npu"]["judged_as"] == "stx"
    assert "predicted for krk (taken to behave as stx)" in text
    notes = check(home / "m.onnx", preset="xint8", device="hpt").notes
    assert any("hpt is taken to behave as phx" in note for note in notes)
    assert not any("taken to behave" in note for note in check(home / "m.onnx", device="stx").notes)


def test_inspect_says_it_too(home: Path) -> None:
    text = " ".join(_call("inspect", home / "m.onnx", "-p", "a8w8").split())
    assert "on the NPU? partly, predicted for stx" in text
    assert "quantize with --device stx: 100.0%" in text
    roundel.quantize(
        home / "m.onnx", home / "done.onnx", preset="a8w8", data=home / "data.npy", effort="none"
    )
    assert "on the NPU? partly" in _call("inspect", home / "done.onnx")
    assert "not foreseen" in _call("inspect", home / "m.onnx", "-p", "matmul_nbits")


def test_the_page_says_it_too(home: Path) -> None:
    page = home / "page.html"
    _quantized(home, "paged.onnx", "--report", str(page))
    assert "quantize with --device stx: 100.0%" in page.read_text()


def test_where_the_device_does_not_help_the_costliest_rule_does() -> None:
    """Phoenix takes no BF16 at all: no step of `quantize` mends that."""
    model = _clipped()
    report = check(model, preset="bf16", device="phx")
    found = placement(report, "phx")
    assert found["npu_share_of_macs"] == 0.0
    assert found["fix"]["option"] is None
    assert "(P19)" in found["fix"]["text"]


def test_no_second_check_where_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning the float model again is for models that need it."""
    model = _clipped()
    report = finished(model, roundel.load_recipe("a16w8"), "stx")
    monkeypatch.setattr("roundel.rules.report.finished", lambda *_: pytest.fail("checked again"))
    assert placed(report, model, None, "stx", None)["fix"] is None
