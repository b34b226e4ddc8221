"""Which layers cost most, what is proposed, and that it helps."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import roundel
from helpers import build, feeds, node, normal, quantize, sqnr
from roundel.errors import RecipeError
from roundel.example import load_example
from roundel.measure.layers import RemedyKind

PLAIN = "a8w8_minmax"


def _spiky() -> onnx.ModelProto:
    """Three matrices; behind the second, one channel is 200 times the others and is then ignored."""
    spike = np.ones((16, 16), np.float32)
    spike[:, 0] *= 200
    blind = normal(16, 16, seed=3)
    blind[0] = 0
    nodes = [
        node("MatMul", ["x", "w1"], ["a"], name="first"),
        node("Relu", ["a"], ["r"], name="relu"),
        node("MatMul", ["r", "w2"], ["b"], name="spike"),
        node("MatMul", ["b", "w3"], ["y"], name="last"),
    ]
    weights = {"w1": normal(16, 16, seed=1), "w2": normal(16, 16, seed=2) * spike, "w3": blind}
    return build(nodes, {"x": [1, 16]}, {"y": [1, 16]}, weights)


def test_the_costly_layer_comes_first_and_its_proposal_helps() -> None:
    model, data = _spiky(), feeds({"x": [1, 16]}, 16)
    found = roundel.sensitivity(model, recipe=PLAIN, data=data)
    worst = found.layers[0]
    assert worst.name == "spike"
    assert [layer.cost for layer in found.layers] == sorted((x.cost for x in found.layers), reverse=True)
    assert sum(layer.share for layer in found.layers) == pytest.approx(1)
    first = next(layer for layer in found.layers if layer.name == "first")
    assert first.nodes == ("first", "relu")  # they compute as one
    assert worst.weights > worst.activations or worst.remedies[0].kind is RemedyKind.A16W8
    assert worst.remedies[-1].option == "--exclude spike"
    better = quantize(model, PLAIN, data, overrides=[{"nodes": ["spike"], "type": "int16"}])
    assert sqnr(model, better, data) >= sqnr(model, quantize(model, PLAIN, data), data)


def test_with_all_switches_on_it_is_the_quantized_model() -> None:
    model, data = _spiky(), feeds({"x": [1, 16]}, 8)
    found = roundel.sensitivity(model, recipe=PLAIN, data=data)
    assert found.sqnr_db == pytest.approx(sqnr(model, quantize(model, PLAIN, data), data), abs=1e-3)


def test_won_back_is_what_the_options_win_back() -> None:
    example = load_example()
    data = example.calibration[:16]
    finer: dict[str, Any] = {"weights": {"per_channel": True}}
    found = roundel.sensitivity(example.model_path, recipe=PLAIN, data=data, worst=2, changes=finer)
    advised = found.worst
    assert len(advised) == 2
    kinds = {layer.remedies[0].kind for layer in advised}
    assert kinds == {RemedyKind.A16W8}
    overrides = [layer.remedies[0].override for layer in advised]
    noise = [
        10
        ** (
            -roundel.quantize(example.model_path, recipe=PLAIN, data=data, changes=changes)
            .record.outputs[0]
            .sqnr_db
            / 10
        )
        for changes in (finer, {**finer, "overrides": overrides})
    ]
    assert advised[-1].won_back == pytest.approx(1 - noise[1] / noise[0], abs=0.02)


def test_the_command_and_the_options_it_proposes(roundel_cli: Any, digits: Path, arrays: Path) -> None:
    ran = roundel_cli("sensitivity", digits, "-p", PLAIN, "--data", arrays, "--look", 2, "--worst", 2)
    assert ran.code == 0
    assert "won" in ran.out
    options = [line for line in ran.out.splitlines() if line.startswith("  -")]
    assert all(len(line) <= 80 for line in ran.out.splitlines() if line not in options)
    target = arrays.parent / "q.onnx"
    for option in {options[0], options[-1], next(x for x in options if "--exclude" in x)}:
        again = roundel_cli(
            "quantize", digits, "-o", target, "-p", PLAIN, "--data", arrays, *shlex.split(option)
        )
        assert again.code == 0, again.err


def test_json(roundel_cli: Any, digits: Path, arrays: Path) -> None:
    ran = roundel_cli("sensitivity", digits, "-p", "xint8", "--data", arrays, "--look", 2, "--json")
    told = json.loads(ran.out)
    assert told["samples"] == 2
    kinds = {remedy["kind"] for layer in told["layers"] for remedy in layer["remedies"]}
    assert "A16W8" not in kinds  # the 8-bit engine has no 16-bit activations
    assert "exclude" in kinds
    assert any("effort fast" in note for note in told["notes"])


@pytest.mark.parametrize("preset", ["bf16", "uint8_dynamic_quant", "matmul_nbits"])
def test_recipes_without_static_integers_are_refused(preset: str) -> None:
    example = load_example()
    with pytest.raises(RecipeError):
        roundel.sensitivity(example.model_path, recipe=preset, data=example.calibration[:2])


def _detector() -> onnx.ModelProto:
    """A head as YOLOv8 has it: DFL, a grid and strides, and boxes joined with scores."""
    bins = np.arange(8, dtype=np.float32).reshape(1, 8, 1, 1)
    nodes = [
        node("Conv", ["x", "wb"], ["boxes"], name="box_conv"),
        node("Conv", ["x", "ws"], ["classes"], name="class_conv"),
        node("Reshape", ["boxes", "to_bins"], ["distances"], name="bins"),
        node("Transpose", ["distances"], ["turned"], name="turn", perm=[0, 2, 1, 3]),
        node("Softmax", ["turned"], ["likely"], name="softmax", axis=1),
        node("Conv", ["likely", "count"], ["summed"], name="dfl"),
        node("Reshape", ["summed", "to_boxes"], ["sides"], name="sides"),
        node("Add", ["grid", "sides"], ["placed"], name="place"),
        node("Mul", ["placed", "stride"], ["scaled"], name="scale"),
        node("Reshape", ["classes", "to_scores"], ["flat"], name="flat"),
        node("Sigmoid", ["flat"], ["scores"], name="sigmoid"),
        node("Concat", ["scaled", "scores"], ["y"], name="join", axis=1),
    ]
    grid = np.tile(np.arange(16, dtype=np.float32), 4).reshape(1, 4, 16)
    constants = {
        "wb": normal(32, 4, 1, 1, seed=1),
        "ws": normal(3, 4, 1, 1, seed=2),
        "count": bins,
        "grid": grid,
        "stride": np.asarray(16.0, np.float32),
        "to_bins": np.asarray([1, 4, 8, 16], np.int64),
        "to_boxes": np.asarray([1, 4, 16], np.int64),
        "to_scores": np.asarray([1, 3, 16], np.int64),
    }
    return build(nodes, {"x": [1, 4, 4, 4]}, {"y": [1, 7, 16]}, constants)


def test_a_detection_head_is_recognised_and_its_exclusion_works(tmp_path: Path) -> None:
    model, data = _detector(), feeds({"x": [1, 4, 4, 4]}, 8)
    found = roundel.sensitivity(model, recipe=PLAIN, data=data)
    assert found.head is not None
    signs = " ".join(found.head.signs)
    assert "DFL" in signs
    assert "box decoding" in signs
    assert "ranges differ" in signs
    assert "box_conv" not in found.head.nodes
    _, words = shlex.split(found.head.option)
    start, end = words.split("->")
    cut = {"exclude_subgraphs": [{"inputs": start.split(","), "outputs": end.split(",")}]}
    result = quantize(model, PLAIN, data, selection=cut)
    assert {n.name for n in result.plan.nodes.values() if n.quantized} == {"box_conv", "class_conv"}
    assert sqnr(model, result, data) > sqnr(model, quantize(model, PLAIN, data), data)


def test_a_classifier_has_no_detection_head() -> None:
    example = load_example()
    found = roundel.sensitivity(example.model_path, recipe=PLAIN, data=example.calibration[:4], samples=1)
    assert found.head is None
