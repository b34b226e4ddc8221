"""A small network and a reader as scripts write them."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from script_cases import Reader, network


@pytest.fixture
def model() -> onnx.ModelProto:
    return network()


@pytest.fixture
def path(model: onnx.ModelProto, tmp_path: Path) -> Path:
    file = tmp_path / "float.onnx"
    onnx.save(model, file)
    return file


@pytest.fixture
def reader() -> Reader:
    return Reader()
