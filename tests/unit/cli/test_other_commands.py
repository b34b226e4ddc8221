"""`roundel explain`, `inspect`, `presets` and `demo`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import roundel
from helpers import build, node, normal
from roundel.example import load_example
from roundel.recipe.load import load_recipe, preset_names


@pytest.fixture
def quantized(digits: Path, tmp_path: Path) -> Path:
    path = tmp_path / "q.onnx"
    roundel.quantize(digits, path, data=load_example().calibration[:4])
    return path


def test_explain_all(roundel_cli: Any, digits: Path) -> None:
    ran = roundel_cli("explain", digits)
    assert ran.code == 0
    assert "logits" in ran.out
    assert "Flatten is not in the operator table" in " ".join(ran.out.split())
    assert all(len(line) <= 80 for line in ran.out.splitlines())


def test_explain_one_tensor(roundel_cli: Any, digits: Path) -> None:
    ran = roundel_cli("explain", digits, "--tensor", "logits", "-p", "a16w8")
    assert "int16" in ran.out
    assert "classifier" in ran.out
    assert "stem" not in ran.out


def test_explain_as_json(roundel_cli: Any, digits: Path) -> None:
    told = json.loads(roundel_cli("explain", digits, "--json", "-x", "classifier").out)
    by_name = {tensor["name"]: tensor for tensor in told["tensors"]}
    assert by_name["image"]["stored_as"] == "int8, symmetric"
    assert by_name["image"]["decided_by"] == "stem_conv"
    assert "excluded by 'classifier'" in told["float"]["logits"]
    assert any(n["name"] == "classifier" and not n["quantized"] for n in told["nodes"])
    one = json.loads(roundel_cli("explain", digits, "--json", "--tensor", "image").out)
    assert [tensor["name"] for tensor in one["tensors"]] == ["image"]


def test_explain_an_unknown_tensor(roundel_cli: Any, digits: Path) -> None:
    ran = roundel_cli("explain", digits, "--tensor", "logit")
    assert ran.code == 2
    assert "Did you mean 'logits'?" in ran.err


def test_inspect_a_float_model(roundel_cli: Any, digits: Path) -> None:
    ran = roundel_cli("inspect", digits)
    assert "image: float32 [N, 1, 16, 16]" in ran.out
    assert "BatchNormalization" in ran.out
    assert "a8w8 would quantize 30 of 31 nodes" in ran.out
    assert "stem_conv" not in ran.out
    assert "stem_conv" in roundel_cli("inspect", digits, "--nodes").out


def test_inspect_as_json(roundel_cli: Any, digits: Path) -> None:
    told = json.loads(roundel_cli("inspect", digits, "--json", "--nodes", "-p", "A16W8").out)
    assert told["quantized_by"] == "a16w8"
    assert told["operators"]["Conv"] == 13
    assert told["left"] == {"Flatten": 1}
    assert {"name": "stem_conv", "op": "Conv", "verdict": "quantized"} in told["nodes"]
    assert "nodes" not in json.loads(roundel_cli("inspect", digits, "--json").out)


def test_inspect_counts_weights_in_constant_nodes(roundel_cli: Any, tmp_path: Path) -> None:
    weight = onnx.numpy_helper.from_array(normal(4, 4), "k")
    nodes = [node("Constant", [], ["k"], name="c", value=weight), node("MatMul", ["x", "k"], ["y"], name="m")]
    onnx.save(build(nodes, {"x": [1, 4]}, ["y"], {}), tmp_path / "m.onnx")
    told = json.loads(roundel_cli("inspect", tmp_path / "m.onnx", "--json").out)
    assert (told["weight_bytes"], told["weight_types"]) == (64, {"float": 64})


def test_inspect_a_quantized_model(roundel_cli: Any, quantized: Path) -> None:
    ran = roundel_cli("inspect", quantized, "--nodes")
    assert ran.code == 0
    assert "the model is quantized already" in ran.out
    assert "QuantizeLinear" in ran.out
    assert "int8" in ran.out
    assert json.loads(roundel_cli("inspect", quantized, "--json").out)["quantized_by"] is None


def test_inspect_a_model_of_quantized_operators(roundel_cli: Any, tmp_path: Path) -> None:
    """No Q/DQ node in it, and yet not a float model."""
    made = node("MatMulInteger", ["x", "k"], ["y"], name="mm")
    model = build(
        [made],
        {"x": [1, 4]},
        {"y": [1, 4]},
        {"k": np.ones((4, 4), np.uint8)},
        types={"x": onnx.TensorProto.UINT8, "y": onnx.TensorProto.INT32},
    )
    onnx.save(model, tmp_path / "m.onnx")
    ran = roundel_cli("inspect", tmp_path / "m.onnx")
    assert ran.code == 0, ran.err
    assert "quantized already" in ran.out


def test_inspect_with_a_wrong_preset(roundel_cli: Any, digits: Path) -> None:
    assert roundel_cli("inspect", digits, "-p", "a8w9").code == 2


def test_long_names_stay_within_80_columns(roundel_cli: Any, tmp_path: Path) -> None:
    name = "/very/long/" * 12 + "name"
    model = build(
        [node("Conv", ["x", "w"], [name], name=name)], {"x": [1, 3, 8, 8]}, [name], {"w": normal(4, 3, 1, 1)}
    )
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    for arguments in (
        ("inspect", path, "--nodes"),
        ("explain", path),
        ("quantize", path, "-o", tmp_path / "q.onnx", "--random", "1"),
    ):
        ran = roundel_cli(*arguments)
        assert ran.code == 0
        lines = (line for line in ran.out.splitlines() if not line.startswith(" next: "))  # to be copied
        assert all(len(line) <= 80 for line in lines), ran.out
        assert "/very/long//very/long/" in "".join(ran.out.split())  # cut in a table, but there


def test_presets_are_listed(roundel_cli: Any) -> None:
    ran = roundel_cli("presets")
    assert all(name in ran.out for name in preset_names())
    assert all(len(line) <= 80 for line in ran.out.splitlines())
    told = json.loads(roundel_cli("presets", "--json").out)
    assert told == {name: load_recipe(name).title for name in preset_names()}


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_s_text_is_a_recipe(roundel_cli: Any, tmp_path: Path, name: str) -> None:
    path = tmp_path / "copy.yaml"
    path.write_text(roundel_cli("presets", name).out)
    assert load_recipe(path) == load_recipe(name)
    assert json.loads(roundel_cli("presets", name, "--json").out)["name"] == name


def test_an_unknown_preset(roundel_cli: Any) -> None:
    ran = roundel_cli("presets", "a8w9")
    assert ran.code == 2
    assert "'a8w8'" in ran.err


def test_demo(roundel_cli: Any) -> None:
    rows = json.loads(roundel_cli("demo", "-p", "a8w8", "--json").out)
    assert [row["preset"] for row in rows] == ["float", "a8w8"]
    assert rows[0]["accuracy"] > 0.97
    assert rows[1]["accuracy"] > 0.9
    assert rows[1]["bytes"] < rows[0]["bytes"]
    assert rows[0]["sqnr_db"] is None


def test_demo_keeps_its_models(roundel_cli: Any, tmp_path: Path) -> None:
    ran = roundel_cli("demo", "-p", "A8W8", "-p", "uint8-dynamic-quant", "-o", tmp_path)
    assert ran.code == 0
    assert "a8w8" in ran.out
    assert {p.name for p in tmp_path.glob("*.onnx")} == {
        "digits.a8w8.onnx",
        "digits.uint8_dynamic_quant.onnx",
    }


def test_demo_into_a_missing_folder(roundel_cli: Any, tmp_path: Path) -> None:
    ran = roundel_cli("demo", "-p", "a8w8", "-o", tmp_path / "none")
    assert ran.code == 5
    assert "Create it first" in ran.err
