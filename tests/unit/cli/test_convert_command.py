"""`roundel convert`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx


def test_a_conversion_with_its_closeness(
    roundel_cli: Any, digits: Path, arrays: Path, tmp_path: Path
) -> None:
    ran = roundel_cli("convert", digits, "-o", tmp_path / "b.onnx", "--data", arrays)
    assert ran.code == 0
    assert "b.onnx" in ran.out
    assert "logits" in ran.out
    assert "dB" in ran.out
    assert all(len(line) <= 80 for line in ran.out.splitlines())


def test_as_json(roundel_cli: Any, digits: Path, tmp_path: Path) -> None:
    target = tmp_path / "h.onnx"
    ran = roundel_cli("convert", digits, "-o", target, "--form", "cast", "--half-weights", "--json")
    told = json.loads(ran.out)
    assert told["file"] == {"name": "h.onnx", "bytes": target.stat().st_size}
    assert told["converted"]["constants"] > 0
    assert told["outputs"] == []
    assert target.stat().st_size < 0.65 * digits.stat().st_size


def test_forms_and_back(roundel_cli: Any, digits: Path, tmp_path: Path) -> None:
    roundel_cli("convert", digits, "-o", tmp_path / "bare.onnx", "--strip-functions")
    assert not onnx.load(tmp_path / "bare.onnx").functions
    ran = roundel_cli("convert", tmp_path / "bare.onnx", "-o", tmp_path / "f.onnx", "--to", "fp32")
    assert ran.code == 0
    assert "Cast" not in {n.op_type for n in onnx.load(tmp_path / "f.onnx").graph.node}


def test_a_misspelt_form(roundel_cli: Any, digits: Path, tmp_path: Path) -> None:
    ran = roundel_cli("convert", digits, "-o", tmp_path / "x.onnx", "--form", "pairs")
    assert ran.code == 2
    assert "Did you mean 'pair'" in ran.err
    assert not (tmp_path / "x.onnx").exists()


def test_the_help_shows_examples(roundel_cli: Any) -> None:
    ran = roundel_cli("convert", "--help")
    assert "roundel convert model.onnx" in ran.out
    assert all(len(line) <= 80 for line in ran.out.splitlines())


def test_quantize_has_the_same_words(roundel_cli: Any, digits: Path, tmp_path: Path) -> None:
    target = tmp_path / "q.onnx"
    ran = roundel_cli("quantize", digits, "-o", target, "-p", "bf16", "--half-weights", "--strip-functions")
    assert ran.code == 0
    model = onnx.load(target)
    assert not model.functions
    assert onnx.TensorProto.BFLOAT16 in {i.data_type for i in model.graph.initializer if len(i.dims) > 1}
    refused = roundel_cli("quantize", digits, "-o", tmp_path / "x.onnx", "--half-weights", "--random", "2")
    assert refused.code == 2
    assert "half_weights" in refused.err
