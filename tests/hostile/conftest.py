"""One model, one way to fail: whatever goes wrong, every file that was there is still there, bit by bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import roundel
from helpers import build, feeds, node, normal
from roundel.errors import RoundelError

Refused = Callable[..., RoundelError]


def snapshot(folder: Path) -> dict[str, str]:
    """Every file and link below a folder, with a digest of its content."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"link to {path.readlink()}"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = "folder"
    return found


@pytest.fixture(scope="session")
def proto() -> onnx.ModelProto:
    """Conv, Relu, pool, Flatten, Gemm."""
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["r"], name="relu"),
        node("GlobalAveragePool", ["r"], ["g"], name="pool"),
        node("Flatten", ["g"], ["f"], name="flat"),
        node("Gemm", ["f", "k", "d"], ["y"], name="fc"),
    ]
    constants = {
        "w": normal(4, 3, 3, 3),
        "b": normal(4, seed=1),
        "k": normal(4, 5, seed=2),
        "d": normal(5, seed=3),
    }
    return build(nodes, {"x": ["n", 3, 8, 8]}, {"y": ["n", 5]}, constants)


@pytest.fixture
def model(tmp_path: Path, proto: onnx.ModelProto) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    return path


@pytest.fixture
def samples() -> list[dict[str, np.ndarray]]:
    return feeds({"x": (1, 3, 8, 8)}, count=3)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """An output of an earlier run, with its record."""
    path = tmp_path / "out.onnx"
    path.write_bytes(b"an earlier result")
    path.with_suffix(".json").write_text("an earlier record")
    return path


@pytest.fixture
def untouched(tmp_path: Path) -> Iterator[None]:
    """Proves at the end of the test that the folder is as it was at its start."""
    before = snapshot(tmp_path)
    yield
    assert snapshot(tmp_path) == before


@pytest.fixture
def refused(tmp_path: Path, output: Path, samples: list[dict[str, np.ndarray]]) -> Refused:
    """Quantize, expect an error, and prove that nothing in the folder has changed."""

    def call(source: Any, kind: type[RoundelError], **options: Any) -> RoundelError:
        before = snapshot(tmp_path)
        arguments = {"output": output, "data": samples, **options}
        with pytest.raises(kind) as caught:
            roundel.quantize(source, **arguments)
        assert snapshot(tmp_path) == before
        assert type(caught.value) is kind
        return caught.value

    return call
