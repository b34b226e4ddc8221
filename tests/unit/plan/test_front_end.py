"""A spectrogram that the model computes itself stays in float; nothing else does for having a Log."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import roundel
from helpers import build, node, normal, rng
from roundel.plan import build_plan
from roundel.plan.float_parts import FRONT_END, find_front_end
from roundel.recipe.load import load_recipe

_SPECTRUM = ["window", "square", "sum", "floor", "log"]


def sound(*, behind: str = "Relu", before: str | None = None, layers: int = 2) -> onnx.ModelProto:
    """Cosines and sines by a Conv, their power, its logarithm, and a small network."""
    time = np.arange(64)
    waves = [np.cos(2 * np.pi * k * time / 64) for k in range(1, 9)]
    waves += [np.sin(2 * np.pi * k * time / 64) for k in range(1, 9)]
    pairs = np.kron([1.0, 1.0], np.eye(8))[..., None]
    nodes = [
        node("Conv", ["x", "waves"], ["wave"], name="window", strides=[32]),
        node("Mul", ["wave", "wave"], ["squares"], name="square"),
        node("Conv", ["squares", "pairs"], ["power"], name="sum"),
        node("Add", ["power", "least"], ["safe"], name="floor"),
        node("Log", ["safe"], ["spectrum"], name="log"),
        node("Conv", ["spectrum", "w1"], ["c"], name="conv1", pads=[1, 1]),
        node(behind, ["c"], ["r"], name="act"),
        node("Conv", ["r", "w2"], ["y"], name="conv2"),
    ]
    if before is not None:
        nodes[1] = node(before, ["wave"], ["bent"], name="before")
        nodes.insert(2, node("Mul", ["bent", "bent"], ["squares"], name="square"))
    constants = {
        "waves": np.stack(waves)[:, None].astype(np.float32),
        "pairs": pairs.astype(np.float32),
        "least": np.float32(1e-7),
        "w1": normal(8, 8, 3),
        "w2": normal(4, 8, 1, seed=1),
    }
    last = "y"
    if not layers:
        nodes, last = nodes[:5], "spectrum"
        del constants["w1"], constants["w2"]
    return build(nodes, {"x": [1, 1, 2048]}, [last], constants)


def sounds(count: int = 12) -> list[dict[str, Any]]:
    """Tones over a faint noise: powers from 1e-6 to 1e3."""
    time = np.arange(2048)
    made = []
    for k in range(count):
        tone = np.sin(2 * np.pi * (1 + k % 7) * time / 64 + k) * (1 + time / 2048)
        made.append({"x": (tone + 1e-3 * rng(k).standard_normal(2048)).astype(np.float32)[None, None]})
    return made


def _spared(proto: onnx.ModelProto) -> set[str]:
    return {str(node.name) for node in find_front_end(ir.from_proto(proto).graph)}


def test_all_up_to_the_log() -> None:
    assert _spared(sound()) == set(_SPECTRUM)


def test_not_behind_a_network() -> None:
    """Log probabilities at the end of a network, say: the whole of it would be in front of the Log."""
    assert _spared(sound(before="Relu")) == set()


def test_not_without_a_network_behind() -> None:
    assert _spared(sound(layers=0)) == set()


def test_not_without_a_transform() -> None:
    nodes = [
        node("Abs", ["x"], ["a"], name="abs"),
        node("Log", ["a"], ["l"], name="log"),
        node("Conv", ["l", "w"], ["y"], name="conv"),
    ]
    assert _spared(build(nodes, {"x": [1, 3, 8, 8]}, ["y"], {"w": normal(4, 3, 3, 3)})) == set()


@pytest.mark.parametrize(
    ("recipe", "changes", "spared"),
    [
        ("a8w8", {}, True),
        ("xint8", {}, True),
        ("a16w8", {}, True),
        ("a8w8", {"effort": "none"}, False),
        ("a8w8", {"improve": {"front_end": False}}, False),
        ("bf16", {}, False),
    ],
)
def test_where_effort_is_asked_for(recipe: str, changes: dict[str, Any], spared: bool) -> None:
    plan = build_plan(ir.from_proto(sound()), load_recipe(recipe, changes))
    assert [plan.nodes[name].reason == FRONT_END for name in _SPECTRUM] == [spared] * 5
    assert plan.nodes["conv1"].quantized


def test_a_node_that_is_asked_for_by_name_is_quantized() -> None:
    recipe = load_recipe("a8w8", {"selection": {"include": ["sum", "conv1", "conv2"]}})
    plan = build_plan(ir.from_proto(sound()), recipe)
    assert plan.nodes["sum"].quantized
    assert plan.nodes["window"].reason == FRONT_END


def test_it_is_worth_it_and_said() -> None:
    """Four nodes: the Add has become the bias of the Conv before it."""
    kept = roundel.quantize(sound(), recipe="a8w8", data=sounds())
    whole = roundel.quantize(sound(), recipe="a8w8", data=sounds(), changes={"improve": {"front_end": False}})
    assert kept.record.outputs[0].sqnr_db > whole.record.outputs[0].sqnr_db + 6
    assert any(
        note.startswith("4 nodes that compute a spectrogram stay in float") for note in kept.record.notes
    )
    assert not any("spectrogram" in note for note in whole.record.notes)
