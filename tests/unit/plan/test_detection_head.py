"""Boxes and scores behind the last layers stay in float; other tails do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import roundel
from helpers import build, feeds, node, normal
from roundel.plan import build_plan
from roundel.plan.float_parts import HEAD, find_detection_head
from roundel.recipe.load import load_recipe

_STRIDE = 32.0


def detector(*, joined: bool = True, gate: bool = True) -> onnx.ModelProto:
    """A trunk, one layer for boxes in pixels and one for scores, joined in one output."""
    nodes = [
        node("Conv", ["x", "w"], ["t"], name="trunk", pads=[1, 1, 1, 1]),
        node("Relu", ["t"], ["r"], name="relu"),
        node("Conv", ["r", "wb"], ["b"], name="box_layer"),
        node("Conv", ["r", "ws"], ["s"], name="score_layer"),
        node("Mul", ["b", "stride"], ["boxes"], name="decode"),
        node("Sigmoid", ["s"], ["scores"], name="scores")
        if gate
        else node("Relu", ["s"], ["scores"], name="scores"),
    ]
    if joined:
        nodes.append(node("Concat", ["boxes", "scores"], ["y"], name="join", axis=1))
    constants = {
        "w": normal(8, 3, 3, 3),
        "wb": 3 * normal(4, 8, 1, 1, seed=1),
        "ws": normal(2, 8, 1, 1, seed=2),
        "stride": np.float32(_STRIDE),
    }
    return build(nodes, {"x": [1, 3, 16, 16]}, ["y"] if joined else ["boxes", "scores"], constants)


def _found(proto: onnx.ModelProto) -> set[str]:
    return {str(n.name) for n in find_detection_head(ir.from_proto(proto).graph)}


def test_all_behind_the_last_layers() -> None:
    assert _found(detector()) == {"decode", "scores", "join"}


def test_outputs_of_their_own_need_no_care() -> None:
    assert _found(detector(joined=False)) == set()


def test_a_concat_without_probabilities_is_none() -> None:
    assert _found(detector(gate=False)) == set()


def test_a_branch_that_has_nothing_to_do_with_it_is_quantized() -> None:
    proto = detector()
    proto.graph.node.append(node("Conv", ["r", "w3"], ["m"], name="mask_layer"))
    proto.graph.node.append(node("Sigmoid", ["m"], ["mask"], name="mask"))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(normal(1, 8, 1, 1, seed=3), "w3"))
    proto.graph.output.append(onnx.helper.make_tensor_value_info("mask", 1, [1, 1, 16, 16]))
    assert _found(proto) == {"decode", "scores", "join"}


def test_products_of_scores_are_scores() -> None:
    nodes = [
        node("Conv", ["x", "w"], ["c"], name="layer"),
        node("Split", ["c"], ["o", "p"], name="split", axis=1, num_outputs=2),
        node("Sigmoid", ["o"], ["a"], name="object"),
        node("Sigmoid", ["p"], ["b"], name="class"),
        node("Mul", ["a", "b"], ["score"], name="score"),
        node("Concat", ["score", "a"], ["y"], name="join", axis=1),
    ]
    proto = build(nodes, {"x": [1, 3, 8, 8]}, ["y"], {"w": normal(4, 3, 1, 1)}, opset=18)
    assert _found(proto) == set()


def test_without_a_layer_there_is_no_head() -> None:
    nodes = [node("Sigmoid", ["x"], ["s"], name="s"), node("Concat", ["x", "s"], ["y"], name="join", axis=1)]
    assert _found(build(nodes, {"x": [1, 3, 8, 8]}, ["y"], {})) == set()


@pytest.mark.parametrize(
    ("recipe", "changes", "spared"),
    [
        ("a8w8", {}, True),
        ("xint8", {}, True),
        ("a8w8", {"effort": "none"}, False),
        ("a8w8", {"improve": {"detection_head": False}}, False),
        ("a8w8", {"selection": {"include": ["join"]}}, False),
        ("bf16", {}, False),
    ],
)
def test_where_effort_is_asked_for(recipe: str, changes: dict[str, Any], spared: bool) -> None:
    plan = build_plan(ir.from_proto(detector()), load_recipe(recipe, changes))
    assert (plan.nodes["join"].reason == HEAD) is spared


def test_scores_live_and_it_is_said() -> None:
    data = feeds({"x": [1, 3, 16, 16]}, 12)
    kept, whole = (
        roundel.quantize(detector(), recipe="a8w8", data=data, changes={"improve.detection_head": wanted})
        for wanted in (True, False)
    )
    assert _score_error(kept) < 0.05 < _score_error(whole)
    assert any("nodes of the detection head stay in float" in note for note in kept.record.notes)
    assert not any("detection head" in note for note in whole.record.notes)


def _score_error(done: roundel.QuantizeResult) -> float:
    """The mean error of the scores, which lie between 0 and 1."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    model, sample = detector(), feeds({"x": [1, 3, 16, 16]}, 1)[0]
    true, got = (
        ort.InferenceSession(proto.SerializeToString(), options).run(None, sample)[0]
        for proto in (model, done.model)
    )
    return float(np.abs(true[:, 4:] - got[:, 4:]).mean())


def test_boxes_and_scores_are_compared_apart() -> None:
    done = roundel.quantize(
        detector(),
        recipe="a8w8",
        data=feeds({"x": [1, 3, 16, 16]}, 12),
        changes={"improve.detection_head": False, "improve.goal": 0},
    )
    whole = {report.name: report.sqnr_db for report in done.record.outputs}
    assert set(whole) == {"y[:, 0:4]", "y[:, 4:6]"}
    assert whole["y[:, 0:4]"] > 25
    assert whole["y[:, 4:6]"] < 12
    assert any("'y[:, 4:6]' is far from the float model" in note for note in done.record.notes)
