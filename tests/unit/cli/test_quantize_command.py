"""`roundel quantize`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import PIL.Image
import pytest

from helpers import build, node, normal
from roundel.errors import (
    DataError,
    DependencyError,
    ModelError,
    OutputError,
    RecipeError,
    RoundelError,
    SelectionError,
    VerifyError,
)
from roundel.example import load_example


def test_a_folder_of_arrays(roundel_cli: Any, digits: Path, arrays: Path, tmp_path: Path) -> None:
    out = tmp_path / "q.onnx"
    ran = roundel_cli("quantize", digits, "-o", out, "--data", arrays)
    assert ran.code == 0
    assert "digits.onnx" in ran.out
    assert "q.onnx" in ran.out
    assert "8 samples" in ran.out
    assert "logits" in ran.out
    assert "dB" in ran.out
    assert all(len(line) <= 80 for line in ran.out.splitlines() if not line.startswith(" next: "))
    onnx.checker.check_model(str(out))
    record = json.loads(out.with_suffix(".json").read_text())
    assert record["data"]["kind"] == "array folder"
    assert record["data"]["samples_seen"] == 8


def test_one_archive(roundel_cli: Any, digits: Path, tmp_path: Path) -> None:
    stacked = np.concatenate([sample["image"] for sample in load_example().calibration[:6]])
    np.savez(tmp_path / "all.npz", image=stacked)
    ran = roundel_cli(
        "quantize", digits, "-o", tmp_path / "q.onnx", "--data", tmp_path / "all.npz", "--samples", 4
    )
    assert ran.code == 0
    assert ".npz file, 4 samples" in ran.out


def test_a_folder_of_images(roundel_cli: Any, digits: Path, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for index in range(3):
        pixels = np.random.default_rng(index).integers(0, 256, (20, 24), dtype=np.uint8)
        PIL.Image.fromarray(pixels).save(folder / f"{index}.png")
    out = tmp_path / "q.onnx"
    ran = roundel_cli(
        "quantize", digits, "-o", out, "--data", folder, "--mean", "0.5", "--std", "0.5", "--resize", "16x16"
    )
    assert ran.code == 0, ran.err
    assert "image folder, 3 samples" in ran.out
    record = json.loads(out.with_suffix(".json").read_text())
    assert record["recipe"]["data"]["mean"] == [0.5]
    assert "resize to 16x16" in record["data"]["preprocessing"]


def test_random_data_are_called_random(roundel_cli: Any, digits: Path, tmp_path: Path) -> None:
    ran = roundel_cli("quantize", digits, "-o", tmp_path / "q.onnx", "--random", 2)
    assert ran.code == 0
    assert "random data, 2 samples" in ran.out
    assert "note: calibrated on random data" in ran.out


def test_json_is_the_record(roundel_cli: Any, digits: Path, arrays: Path, tmp_path: Path) -> None:
    out = tmp_path / "q.onnx"
    ran = roundel_cli("quantize", digits, "-o", out, "--data", arrays, "--json")
    assert ran.err == ""
    assert json.loads(ran.out) == json.loads(out.with_suffix(".json").read_text())


def test_quiet_prints_nothing(digits: Path, arrays: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "roundel", "quantize", str(digits), "-o", str(tmp_path / "q.onnx")]
    ran = subprocess.run([*command, "--data", str(arrays), "-q"], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_paths_with_spaces_and_other_scripts(
    roundel_cli: Any, digits: Path, arrays: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "größe ünd raum 数字 [1]"
    folder.mkdir()
    model = folder / "modèle [bold]x 1.onnx"
    model.write_bytes(digits.read_bytes())
    out = folder / "ergebnis [red] ß.onnx"
    ran = roundel_cli("quantize", model, "-o", out, "--data", arrays)
    assert ran.code == 0, ran.err
    assert "modèle [bold]x 1.onnx" in ran.out
    assert "ergebnis [red] ß.onnx" in ran.out
    assert out.with_suffix(".json").exists()


def test_names_are_not_markup(roundel_cli: Any, tmp_path: Path) -> None:
    nodes = [node("Conv", ["x[0]:key:", "w"], ["[red]y[/red]"], name="a[/]b")]
    model = build(nodes, {"x[0]:key:": [1, 3, 8, 8]}, ["[red]y[/red]"], {"w": normal(4, 3, 1, 1)})
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    ran = roundel_cli("quantize", path, "-o", tmp_path / "q.onnx", "--random", 2, "-x", "a[/]b")
    assert "[red]y[/red]" in ran.out
    assert "x[0]:key:" in roundel_cli("explain", path, "--tensor", "x[0]:key:").out
    listed = roundel_cli("inspect", path, "--nodes").out
    assert "a[/]b" in listed
    assert "x[0]:key:: float32 [1, 3, 8, 8]" in listed


def test_a_recipe_file_and_changes(roundel_cli: Any, digits: Path, arrays: Path, tmp_path: Path) -> None:
    shown = roundel_cli("presets", "a16w8")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(shown.out)
    out = tmp_path / "q.onnx"
    ran = roundel_cli(
        *("quantize", digits, "-o", out, "--data", arrays, "--recipe", recipe, "--json"),
        *("-s", "weights.per_channel=true", "-s", "calibration.candidates=[99, 99.9]"),
        *("-x", "op:Gemm", "--exclude-subgraph", "block0_expand_conv->block0_project_conv"),
    )
    assert ran.code == 0, ran.out
    record = json.loads(ran.out)
    assert record["recipe"]["activations"]["type"] == "int16"
    assert record["recipe"]["weights"]["per_channel"] is True
    assert record["recipe"]["calibration"]["candidates"] == [99, 99.9]
    assert record["float_nodes"]["classifier"] == "excluded by 'op:Gemm'"
    assert "excluded subgraph" in record["float_nodes"]["block0_depthwise_conv"]


def test_only_some_nodes(roundel_cli: Any, digits: Path, arrays: Path, tmp_path: Path) -> None:
    ran = roundel_cli(
        "quantize", digits, "-o", tmp_path / "q.onnx", "--data", arrays, "--include", "stem*", "--json"
    )
    assert json.loads(ran.out)["counts"]["quantized_nodes"] == {"Conv": 1, "Clip": 1}


# Errors: one exit code for each kind, text that helps, never a traceback.


def test_every_kind_of_error_has_its_exit_code() -> None:
    kinds = {RoundelError: 1, RecipeError: 2, ModelError: 3, DataError: 4, OutputError: 5, VerifyError: 6}
    kinds |= {DependencyError: 7, SelectionError: 2}
    assert {kind: kind.exit_code for kind in kinds} == kinds


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["none.onnx", "-o", "OUT", "--random", "1"], 3, "does not exist"),
        (["MODEL", "-o", "OUT"], 4, "needs calibration data"),
        (["MODEL", "-o", "OUT", "--data", "none"], 4, "do not exist"),
        (["MODEL", "-o", "none/q.onnx", "--random", "1"], 5, "folder does not exist"),
        (["MODEL", "-o", "OUT", "--random", "1", "-p", "a8w9"], 2, "Did you mean 'a8w8'"),
        (["MODEL", "-o", "OUT", "--random", "1", "-x", "stem_cnov"], 2, "'stem_conv'"),
        (["MODEL", "-o", "OUT", "--random", "1", "-s", "weights.tpye=int8"], 2, "'type'"),
        (["MODEL", "-o", "OUT", "--random", "1", "-s", "weights"], 2, "KEY=VALUE"),
        (["MODEL", "-o", "OUT", "--random", "1", "-s", "weights=1", "-s", "weights.type=int8"], 2, "group"),
        (["MODEL", "-o", "OUT", "--random", "1", "-s", "selection=1", "--include", "a"], 2, "group"),
        (["MODEL", "-o", "OUT", "--random", "1", "-s", "weights.type=[1"], 2, "YAML value"),
        (["MODEL", "-o", "OUT", "--random", "1", "--exclude-subgraph", "a"], 2, "both ends"),
        (["MODEL", "-o", "OUT", "--random", "1", "--data", "."], 2, "one of them"),
        (["MODEL", "-o", "OUT", "--random", "1", "-p", "a8w8", "-r", "x.yaml"], 2, "extends: a8w8"),
        (["MODEL", "-o", "OUT", "--random", "1", "-r", "a8w8"], 2, "--preset a8w8"),
        (["MODEL", "-o", "OUT", "--random", "0"], 4, "1 or more"),
        (["MODEL", "-o", "OUT", "--random", "1", "--samples", "0"], 2, "data.samples"),
        (["MODEL", "-o", "OUT", "--data", ".", "--mean", "a,b"], 2, "takes numbers"),
        (["MODEL", "-o", "OUT", "--data", ".", "--resize", "big"], 2, "224x320"),
        (["MODEL", "-o", "OUT", "--data", ".", "--scale", "unti"], 2, "'unit'"),
    ],
)
def test_errors(
    roundel_cli: Any,
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [{"MODEL": str(digits), "OUT": "q.onnx"}.get(word, word) for word in arguments]
    ran = roundel_cli("quantize", *given)
    assert ran.code == code
    assert ran.out == ""
    assert ran.err.strip().startswith("error:")
    assert words in " ".join(ran.err.split())
    assert list(tmp_path.iterdir()) == []


def test_an_error_as_json(roundel_cli: Any, digits: Path, tmp_path: Path) -> None:
    ran = roundel_cli("quantize", digits, "-o", tmp_path / "q.onnx", "-p", "a8w9", "--json")
    assert ran.code == 2
    assert ran.err == ""
    told = json.loads(ran.out)
    assert told["error"] == "RecipeError"
    assert told["what to do"] == "Did you mean 'a8w8'?"


def test_a_broken_model_says_so_once(roundel_cli: Any, tmp_path: Path) -> None:
    """onnx-ir logs warnings about such a file, too: they must not reach the user."""
    model = build([node("Relu", ["x"], ["y"], name="relu")], {"x": [1]}, ["y"])
    model.graph.node[0].input[0] = "nowhere"
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    ran = subprocess.run(
        [sys.executable, "-m", "roundel", "inspect", str(path)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 3
    assert ran.stderr.startswith("error:")
    assert ran.stderr.count("nowhere") == 1


def test_ids_that_no_table_has_are_an_error(roundel_cli: Any, tmp_path: Path) -> None:
    nodes = [node("Gather", ["table", "ids"], ["e"], name="g"), node("MatMul", ["e", "k"], ["y"], name="m")]
    model = build(
        nodes,
        {"ids": [1, 5]},
        ["y"],
        {"table": normal(7, 8), "k": normal(8, 4)},
        types={"ids": onnx.TensorProto.INT64},
    )
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "0.npz", ids=np.full((1, 5), 50))
    ran = roundel_cli(
        "quantize", tmp_path / "m.onnx", "-o", tmp_path / "q.onnx", "--data", tmp_path / "0.npz"
    )
    assert ran.code == 4, ran.err
    assert "The model could not run a sample." in ran.err
    assert not (tmp_path / "q.onnx").exists()


def test_a_goal_that_is_missed_is_an_exit_code(
    roundel_cli: Any, digits: Path, arrays: Path, tmp_path: Path
) -> None:
    out = tmp_path / "q.onnx"
    words = ("quantize", digits, "-o", out, "--data", arrays, "--goal")
    assert roundel_cli(*words, "5dB").code == 0
    ran = roundel_cli(*words, "99dB")
    assert ran.code == 9
    assert out.exists()
    first = ran.out.splitlines()[0]
    assert first.startswith("output 'logits' is far from the float model")
    assert "99 dB" in " ".join(ran.out.split())
