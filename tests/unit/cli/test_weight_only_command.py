"""Weight-only presets on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from helpers import build, node, normal

Roundel = Callable[..., Any]


@pytest.fixture
def perceptron(tmp_path: Path) -> Path:
    nodes = [
        node("Gemm", ["x", "w", "b"], ["h"], name="first", transB=1),
        node("Relu", ["h"], ["r"], name="relu"),
        node("MatMul", ["r", "v"], ["y"], name="second"),
    ]
    constants = {"w": normal(48, 64, seed=1), "b": normal(48, seed=2), "v": normal(48, 10, seed=3)}
    path = tmp_path / "perceptron.onnx"
    onnx.save(build(nodes, {"x": ["n", 64]}, {"y": ["n", 10]}, constants), path)
    return path


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    folder = tmp_path / "rows"
    folder.mkdir()
    for index in range(8):
        np.save(folder / f"{index}.npy", normal(16, 6, seed=index) @ normal(6, 64, seed=50))
    return folder


def test_without_data(roundel_cli: Roundel, perceptron: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    ran = roundel_cli("quantize", perceptron, "-o", out, "--preset", "matmul_nbits")
    assert ran.code == 0, ran.err
    assert "2 weights in 4 bits" in ran.out
    assert [n.op_type for n in onnx.load(out).graph.node].count("MatMulNBits") == 2
    assert json.loads(out.with_suffix(".json").read_text())["file"]["bytes"] == out.stat().st_size
    assert out.stat().st_size < perceptron.stat().st_size / 2


def test_gptq_with_data(roundel_cli: Roundel, perceptron: Path, rows: Path, tmp_path: Path) -> None:
    ran = roundel_cli(
        "quantize", perceptron, "-o", tmp_path / "o.onnx", "-p", "matmul_nbits_gptq", "--data", rows
    )
    assert ran.code == 0, ran.err
    assert "gptq" in ran.out
    assert "2 of 2 layers" in ran.out
    refused = roundel_cli("quantize", perceptron, "-o", tmp_path / "p.onnx", "-p", "matmul_nbits_gptq")
    assert refused.code == 4
    assert "needs calibration data" in refused.err


def test_explain_shows_the_packed_weights(roundel_cli: Roundel, perceptron: Path) -> None:
    ran = roundel_cli("explain", perceptron, "--preset", "matmul_nbits", "--exclude", "second", "--json")
    tree = json.loads(ran.out)
    assert [(t["name"], t["stored_as"]) for t in tree["tensors"]] == [
        ("w", "4 bits, symmetric, in blocks of 128")
    ]
    verdicts = {n["name"]: n["reason"] for n in tree["nodes"]}
    assert verdicts == {
        "first": "quantized",
        "relu": "Relu is not in the operator table",
        "second": "excluded by 'second'",
    }
    assert roundel_cli("explain", perceptron, "--preset", "matmul_nbits").code == 0


def test_no_npu_takes_it(roundel_cli: Roundel, perceptron: Path, tmp_path: Path) -> None:
    refused = roundel_cli(
        "quantize", perceptron, "-o", tmp_path / "o.onnx", "-p", "matmul_nbits", "--device", "stx"
    )
    assert refused.code == 2
    assert "run on the CPU" in refused.err
    assert roundel_cli("check", perceptron, "--preset", "matmul_nbits").code == 2


def test_effort_is_not_for_this_mode(roundel_cli: Roundel, perceptron: Path, tmp_path: Path) -> None:
    refused = roundel_cli(
        "quantize", perceptron, "-o", tmp_path / "o.onnx", "-p", "matmul_nbits", "--effort", "fast"
    )
    assert refused.code == 2
    assert "weight_only.algorithm" in refused.err


def test_the_presets_are_listed(roundel_cli: Roundel) -> None:
    listed = json.loads(roundel_cli("presets", "--json").out)
    assert {"matmul_nbits", "matmul_nbits_gptq"} <= set(listed)
