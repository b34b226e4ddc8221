"""Models in PyTorch on the command line: .pt2 files, read safely, and factories by name."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import roundel
from helpers import build, node, normal
from roundel.cli.app import app
from roundel.errors import DependencyError, ModelError, RecipeError, RoundelError
from roundel.torch import is_torch_source

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
EXAMPLE = (torch.zeros(2, 3, 9, 11),)
NETWORKS = Path(__file__).parent / "networks.py"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program with an open batch, whose sizes are expressions in the file."""

    class Strided(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 4, 3, stride=2)

        def forward(self, x: Any) -> Any:
            return torch.nn.functional.interpolate(self.conv(x), scale_factor=1.5)

    path = tmp_path_factory.mktemp("pt2") / "net.pt2"
    auto = torch.export.Dim.AUTO
    program = torch.export.export(
        Strided().eval(), (torch.randn(2, 3, 9, 11),), dynamic_shapes=({0: auto, 2: auto, 3: auto},)
    )
    torch.export.save(program, path)
    return path


def rewritten(source: Path, target: Path, change: Any) -> Path:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return target


def test_a_file_of_torch_export(saved: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(0, 1, (4, 3, 9, 11)).astype(np.float32))
    out = tmp_path / "out.onnx"
    command = ["quantize", str(saved), "-o", str(out), "-p", "a8w8_minmax", "--json"]
    done = CliRunner().invoke(app, [*command, "--data", str(tmp_path / "x.npy")])
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["model"]["name"] == "net.pt2"
    assert record["counts"]["quantized_nodes"]["Conv"] == 1
    shutil.copy(saved, tmp_path / "net.pt2")
    with pytest.raises(RoundelError, match="overwrite the input"):
        roundel.quantize(str(tmp_path / "net.pt2"), tmp_path / "net.pt2", data=roundel.RandomData(2))


class Trap:
    """Unpickling it would run something."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("trapped"),))


def test_a_pickle_with_more_than_tensors_is_not_read(saved: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    buffer = io.BytesIO()
    torch.save((Trap(),), buffer)

    def change(name: str, content: bytes) -> bytes:
        return buffer.getvalue() if "sample_inputs" in name else content

    bad = rewritten(saved, tmp_path / "bad.pt2", change)
    with pytest.raises(ModelError, match="run as code"):
        roundel.quantize(bad, data=roundel.RandomData(1))
    assert not Path("trapped").exists()


def test_a_weight_that_is_a_pickle_is_not_read(saved: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)

    def change(name: str, content: bytes) -> bytes:
        if name.endswith("model_weights_config.json"):
            tree = json.loads(content)
            next(iter(tree["config"].values()))["use_pickle"] = True
            return json.dumps(tree).encode()
        return pickle.dumps(Trap()) if name.endswith("weights/weight_0") else content

    bad = rewritten(saved, tmp_path / "bad.pt2", change)
    with pytest.raises(ModelError, match="run as code"):
        roundel.quantize(bad, data=roundel.RandomData(1))
    assert not Path("trapped").exists()


@pytest.mark.parametrize("looked_through", [True, False])
def test_an_older_archive_s_pickle_is_not_read(
    looked_through: bool, saved: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """torch reads tensors first and, where that fails, falls back to Python's pickle."""
    from roundel.torch import archive

    monkeypatch.chdir(tmp_path)
    bad = older(saved, tmp_path / "bad.pt2", (Trap(),))
    if not looked_through:  # torch, too, would not run it
        monkeypatch.setattr(archive, "_look_through", lambda *_: None)
    with pytest.raises(ModelError, match="run as code" if looked_through else "torch.export can load"):
        roundel.quantize(bad, data=roundel.RandomData(1))
    assert not Path("trapped").exists()
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


def test_an_older_archive_of_tensors(saved: Path, tmp_path: Path) -> None:
    state = dict(torch.export.load(saved).state_dict)
    result = roundel.quantize(older(saved, tmp_path / "old.pt2", state), data=roundel.RandomData(2))
    assert result.record.counts["quantized_nodes"]["Conv"] == 1


def older(source: Path, target: Path, state: Any) -> Path:
    """An archive as torch 2.7 wrote it."""
    from torch._export.serde.schema import SCHEMA_VERSION

    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        (program,) = (old.read(name) for name in old.namelist() if name.endswith("models/model.json"))
        new.writestr("version", ".".join(map(str, SCHEMA_VERSION)))
        new.writestr("serialized_exported_program.json", program)
        for name, content in (("state_dict", state), ("constants", {}), ("example_inputs", (EXAMPLE, {}))):
            buffer = io.BytesIO()
            torch.save(content, buffer)
            new.writestr(f"serialized_{name}.pt", buffer.getvalue())
    return target


@pytest.mark.parametrize(
    "size",
    ["__import__('pathlib').Path('trapped').touch()", "Max('open(\\'trapped\\', \\'w\\')')", "s0.x", "[s0]"],
)
def test_a_size_that_is_no_arithmetic_is_not_computed(
    size: str, saved: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)

    def change(name: str, content: bytes) -> bytes:
        text = json.dumps(size).encode()
        first = b"\"Symbol('s77', positive=True, integer=True)\""
        return content.replace(first, text) if name.endswith("models/model.json") else content

    bad = rewritten(saved, tmp_path / "bad.pt2", change)
    assert bad.stat().st_size != saved.stat().st_size
    with pytest.raises(ModelError, match="run as code"):
        roundel.quantize(bad, data=roundel.RandomData(1))
    assert not Path("trapped").exists()


def test_a_file_that_is_no_program(tmp_path: Path) -> None:
    (tmp_path / "a.pt2").write_bytes(b"nothing")
    with pytest.raises(ModelError, match=r"torch\.export can load"):
        roundel.quantize(tmp_path / "a.pt2", data=roundel.RandomData(1))
    with pytest.raises(ModelError, match="does not exist"):
        roundel.quantize(tmp_path / "b.pt2", data=roundel.RandomData(1))


def test_a_factory_by_name(tmp_path: Path, monkeypatch: Any) -> None:
    shutil.copy(NETWORKS, tmp_path / "my_networks.py")
    monkeypatch.chdir(tmp_path)
    command = ["-o", "out.onnx", "-p", "a8w8_minmax", "--random", "2"]
    done = CliRunner().invoke(app, ["quantize", "my_networks:cnn_with_example", *command, "--dynamic-batch"])
    assert done.exit_code == 0, done.output
    assert "equals the module" in " ".join(done.output.split())
    # A factory without an example, in a file: the shape is said on the command line.
    command = ["quantize", "./my_networks.py:cnn", *command]
    done = CliRunner().invoke(app, [*command, "--shape", "x=1x3x8x8", "--report", "page.html"])
    assert done.exit_code == 0, done.output
    assert Path("page.html").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module:make", "no such Python module"),
        ("./absent.py:make", "Python file does not exist"),
        ("json:lods", "no such factory"),
        (f"{NETWORKS}:nothing", "gives no module"),
    ],
)
def test_factories_that_are_none(name: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        roundel.quantize(name, data=roundel.RandomData(1))


def test_without_torch_it_is_said_what_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build([node("MatMul", ["x", "w"], ["y"])], {"x": [1, 4]}, ["y"], {"w": normal(4, 4)})
    made = roundel.quantize(model, data=roundel.RandomData(2))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DependencyError, match="Models in PyTorch") as raised:
        roundel.quantize(torch.nn.Linear(2, 2), example_inputs=torch.zeros(1, 2))
    assert "no torch and no onnxscript" in str(raised.value.observed)
    with pytest.raises(DependencyError, match="A module for evaluation"):
        made.as_torch()
    with pytest.raises(DependencyError, match="Fine-tuning"):
        roundel.quantize(model, recipe="a8w8_adaround", data=roundel.RandomData(2))


def test_what_is_of_pytorch(tmp_path: Path) -> None:
    odd = tmp_path / "a:b.onnx"
    odd.touch()
    assert not is_torch_source(odd)
    assert not is_torch_source("model.onnx")
    assert is_torch_source("package.module:make")
    with pytest.raises(RecipeError, match="for models in PyTorch"):
        roundel.quantize(odd, dynamic_batch=True)
