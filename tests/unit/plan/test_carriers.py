"""What only carries values to nodes in float is not quantized; what carries codes, or leads out, is."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import roundel
from helpers import build, feeds, node, normal
from roundel.plan import build_plan
from roundel.plan.float_parts import CARRIES
from roundel.recipe.load import load_recipe

_HIDDEN = 8


def typed(proto: onnx.ModelProto) -> ir.Model:
    """As a model is planned: with the types and shapes of all tensors."""
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


def recurrent(*, layer: bool = False, second: bool = False) -> onnx.ModelProto:
    """A Transpose and a Slice in front of an LSTM, and a matrix behind it; perhaps one before, or beside."""
    nodes = [
        node("MatMul", ["x", "w0"], ["m"], name="first"),
        node("Transpose", ["m" if layer else "x"], ["t"], name="turn", perm=[1, 0, 2]),
        node("Slice", ["t", "from", "to"], ["s"], name="cut"),
        node("LSTM", ["s", "w", "r"], ["h"], name="lstm", hidden_size=_HIDDEN),
        node("Squeeze", ["h", "one"], ["q"], name="squeeze"),
        node("MatMul", ["q", "w1"], ["y"], name="last"),
    ]
    constants: dict[str, Any] = {
        "w0": normal(4, 4),
        "from": np.array([1]),
        "to": np.array([9]),
        "w": normal(1, 4 * _HIDDEN, 4, seed=1),
        "r": normal(1, 4 * _HIDDEN, _HIDDEN, seed=2, scale=0.3),
        "one": np.array([1]),
        "w1": normal(_HIDDEN, 3, seed=3),
    }
    outputs = ["y"]
    if not layer:
        del nodes[0], constants["w0"]
    if second:
        nodes.append(node("MatMul", ["s", "w2"], ["z"], name="beside"))
        constants["w2"] = normal(4, 2, seed=4)
        outputs.append("z")
    return build(nodes, {"x": [1, 12, 4]}, outputs, constants)


def _spared(proto: onnx.ModelProto, recipe: str = "a8w8", changes: dict[str, Any] | None = None) -> set[str]:
    plan = build_plan(typed(proto), load_recipe(recipe, changes or {}))
    return {name for name, verdict in plan.nodes.items() if verdict.reason == CARRIES}


def test_all_in_front_of_a_float_node() -> None:
    assert _spared(recurrent()) == {"turn", "cut"}
    plan = build_plan(typed(recurrent()), load_recipe("a8w8"))
    assert not {"x", "t", "s"} & plan.tensors.keys()
    assert plan.nodes["squeeze"].quantized  # a quantized layer reads what it carries


def test_codes_pass_behind_a_layer_as_they_are() -> None:
    """The Transpose copies them; the Slice has a scale of its own, and would round them anew."""
    assert _spared(recurrent(layer=True)) == {"cut"}
    assert _spared(recurrent(layer=True), "xint8") == set()  # slices keep their input's scale


def test_not_where_a_quantized_node_reads_as_well() -> None:
    assert _spared(recurrent(second=True)) == set()


def test_what_leads_to_an_output_is_spared_behind_float_nodes_only() -> None:
    behind = [
        node("LSTM", ["x", "w", "r"], ["h"], name="lstm", hidden_size=_HIDDEN),
        node("Squeeze", ["h", "one"], ["y"], name="squeeze"),
        node("Transpose", ["x"], ["z"], name="turn", perm=[1, 0, 2]),
    ]
    constants = {
        "w": normal(1, 4 * _HIDDEN, 4, seed=1),
        "r": normal(1, 4 * _HIDDEN, _HIDDEN, seed=2),
        "one": np.array([1]),
    }
    assert _spared(build(behind, {"x": [12, 1, 4]}, ["y", "z"], constants)) == {"squeeze"}


@pytest.mark.parametrize(
    ("recipe", "changes", "spared"),
    [
        ("a8w8", {}, {"turn", "cut"}),
        ("xint8", {}, {"turn", "cut"}),
        ("a8w8", {"effort": "high"}, {"turn", "cut"}),
        ("a8w8", {"effort": "none"}, set()),
        ("a8w8", {"improve": {"carriers": False}}, set()),
        ("a8w8", {"selection": {"include": ["turn", "last"]}}, set()),
        ("bf16", {}, set()),
    ],
)
def test_where_effort_is_asked_for(recipe: str, changes: dict[str, Any], spared: set[str]) -> None:
    assert _spared(recurrent(), recipe, changes) == spared


def test_it_is_worth_it() -> None:
    """The weights of the last layer are all that is rounded."""
    data = feeds({"x": [1, 12, 4]}, 12)
    kept, whole = (
        roundel.quantize(recurrent(), recipe="a8w8", data=data, changes={"improve.carriers": wanted})
        for wanted in (True, False)
    )
    assert kept.record.outputs[0].sqnr_db > whole.record.outputs[0].sqnr_db + 2
