"""Values that are no tensors, and outputs that the recipe leaves in float."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from helpers import activations, build, feeds, node, normal, plan_of, quantize, sqnr

IMAGE = {"x": [1, 3, 8, 8]}
WEIGHTS = {"w": normal(4, 3, 1, 1), "w2": normal(4, 4, 1, 1)}


def _sequence() -> onnx.ModelProto:
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Relu", ["c"], ["r"]),
        node("SequenceConstruct", ["c", "r"], ["s"]),
        node("SequenceAt", ["s", "i"], ["a"]),
        node("Conv", ["a", "w2"], ["y"]),
    ]
    return build(nodes, IMAGE, {"y": [1, 4, 8, 8]}, {**WEIGHTS, "i": np.array(1, np.int64)})


def _optional() -> onnx.ModelProto:
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Optional", ["c"], ["s"]),
        node("OptionalGetElement", ["s"], ["a"]),
        node("Conv", ["a", "w2"], ["y"]),
    ]
    return build(nodes, IMAGE, {"y": [1, 4, 8, 8]}, WEIGHTS, opset=18)


@pytest.mark.parametrize("all_op_types", [False, True])
@pytest.mark.parametrize("preset", ["bf16", "fp16", "xint8", "a8w8", "a16w8"])
@pytest.mark.parametrize("make", [_sequence, _optional])
def test_sequences_and_optionals_stay_as_they_are(make: object, preset: str, all_op_types: bool) -> None:
    model = _sequence() if make is _sequence else _optional()
    data = feeds(IMAGE)
    result = quantize(model, preset, data, selection={"all_op_types": all_op_types})
    assert "s" not in result.plan.tensors
    assert {"c", "a"} <= result.plan.tensors.keys()
    assert sqnr(model, result, data) > 20


def test_outputs_of_an_operator_stay_float_whoever_reads_them() -> None:
    nodes = [node("Conv", ["x", "w"], ["c"]), node("Conv", ["c", "w2"], ["y"])]
    model = build(nodes, IMAGE, ["y"], WEIGHTS)
    skipped = {"skip_output_op_types": ["Conv"]}
    assert set(activations(quantize(model, placement=skipped).model)) == {"x"}
    plan = plan_of(model, placement=skipped)
    assert plan.kept_float == dict.fromkeys(("c", "y"), "outputs of Conv stay float, as the recipe says")


def test_what_only_moves_values_may_stay_float_too() -> None:
    nodes = [node("MaxPool", ["x"], ["p"], kernel_shape=[2, 2]), node("Conv", ["p", "w"], ["y"])]
    model = build(nodes, IMAGE, ["y"], {"w": WEIGHTS["w"]})
    skipped = {"skip_output_op_types": ["MaxPool"]}
    assert set(activations(quantize(model, placement=skipped).model)) == {"x", "y"}
