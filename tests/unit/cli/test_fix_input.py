"""--fix-input makes an input a constant, in every command that looks at a float model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from helpers import build, feeds, node, normal


@pytest.fixture
def switched(tmp_path: Path) -> Path:
    """One of two matrices, as a rate of 16 or 8 thousand asks for."""
    branches = {
        name: helper.make_graph(
            [node("MatMul", ["x", weight], [out], name=f"{name}_layer")],
            name,
            [],
            [helper.make_tensor_value_info(out, TensorProto.FLOAT, [1, 4])],
        )
        for name, weight, out in (("high", "w1", "a"), ("low", "w2", "b"))
    }
    nodes = [
        node("Equal", ["sr", "rate"], ["is_high"], name="equal"),
        node("If", ["is_high"], ["y"], then_branch=branches["high"], else_branch=branches["low"], name="if"),
    ]
    constants = {"rate": np.int64(16000), "w1": normal(8, 4), "w2": normal(8, 4, seed=1)}
    inputs = {"x": [1, 8], "sr": []}
    path = tmp_path / "m.onnx"
    onnx.save(build(nodes, inputs, {"y": [1, 4]}, constants, types={"sr": TensorProto.INT64}), path)
    return path


def test_quantize(roundel_cli: Any, switched: Path) -> None:
    data, out = switched.parent / "x.npz", switched.parent / "q.onnx"
    np.savez(data, x=np.stack([sample["x"] for sample in feeds({"x": [1, 8]}, 8)]))
    ran = roundel_cli("quantize", switched, "-o", out, "--data", data, "--fix-input", "sr=16000")
    assert ran.code == 0, ran.err
    done = onnx.load(out)
    assert [value.name for value in done.graph.input] == ["x"]
    assert "high_layer" in {one.name for one in done.graph.node}
    assert json.loads(out.with_suffix(".json").read_text())["recipe"]["prepare"]["fixed_inputs"] == {
        "sr": 16000
    }


def test_check_no_longer_finds_control_flow(roundel_cli: Any, switched: Path) -> None:
    assert "P05" in roundel_cli("check", switched).out
    assert "P05" not in roundel_cli("check", switched, "--fix-input", "sr=16000").out


@pytest.mark.parametrize("command", ["explain", "check", "inspect"])
def test_commands_that_look(roundel_cli: Any, switched: Path, command: str) -> None:
    more = ["--nodes"] if command != "explain" else []
    ran = roundel_cli(command, switched, "--fix-input", "sr=8000", "--json", *more)
    assert "low_layer" in ran.out, ran.err
    assert "high_layer" not in ran.out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("sr", "NAME=VALUE"),
        ("sr=fast", "NAME=VALUE"),
        ("srr=16000", "Did you mean 'sr'"),
        ("sr=[1, 2]", "does not fit"),
        ("sr=1.5", "does not fit"),
    ],
)
def test_errors(roundel_cli: Any, switched: Path, words: str, told: str) -> None:
    ran = roundel_cli("explain", switched, "--fix-input", words)
    assert ran.code != 0
    assert told in " ".join(ran.err.split())
