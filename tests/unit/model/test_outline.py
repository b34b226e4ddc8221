"""A model file seen from outside."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import helper

from helpers import build, node, normal
from large_models import matmul_stack
from roundel.model.memory import outline_of


def test_nodes_weights_and_functions_are_told_without_reading_weights(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    model = build([node("MatMul", ["x", "w"], ["y"])], {"x": [1, 64]}, ["y"], {"w": normal(64, 64)})
    onnx.save(model, path)
    seen = outline_of(path)
    assert (seen.nodes, seen.functions) == (1, False)
    assert 64 * 64 * 4 <= seen.weight_bytes < 64 * 64 * 4 + 200
    imports = [helper.make_opsetid("", 17)]
    model.functions.append(
        helper.make_function("own", "F", ["a"], ["b"], [node("Relu", ["a"], ["b"])], imports)
    )
    onnx.save(model, path)
    assert outline_of(path).functions


def test_weights_in_another_file_count(tmp_path: Path) -> None:
    seen = outline_of(matmul_stack(tmp_path / "m.onnx", 3, 128))
    assert (seen.nodes, seen.weight_bytes) == (6, 3 * 128 * 128 * 4)


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"not a model", b"\x3a\xff\xff\xff\x7fshort"])
def test_what_is_no_model_has_an_empty_outline(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    assert outline_of(path).weight_bytes == 0
    assert outline_of(tmp_path / "missing.onnx").nodes == 0
