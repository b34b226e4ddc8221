"""Tensors that must have one scale, pairs that fuse, and Relus that vanish."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from helpers import activations, assert_sound, build, node, normal, ops, plan_of, quantize, run, sqnr, weights
from roundel.plan.types import Fixed, Observed, Shared

SCALAR = np.float32


def _leaders(model: onnx.ModelProto, tensor: str, recipe: str = "a8w8", **changes: Any) -> tuple[str, ...]:
    return plan_of(model, recipe, **changes).leaders(tensor)


def test_a_chain_of_movers_has_one_scale() -> None:
    nodes = [
        node("MaxPool", ["x"], ["p"], kernel_shape=[2, 2]),
        node("Transpose", ["p"], ["t"], perm=[0, 2, 3, 1]),
        node("Reshape", ["t", "shape"], ["y"]),
    ]
    model = build(nodes, {"x": [1, 2, 5, 5]}, ["y"], {"shape": np.int64([1, -1])})
    plan = plan_of(model)
    assert {name: plan.leaders(name) for name in plan.tensors} == dict.fromkeys(("x", "p", "t", "y"), ("x",))
    assert plan.observed_activations() == ("x",)
    result = quantize(model).model
    stored = activations(result)
    assert len({float(s.scale) for s in stored.values()}) == 1
    used = {n.input[1] for n in result.graph.node if n.op_type == "QuantizeLinear"}
    assert used == {"x_scale"}, "one group, one initializer"


def test_movers_follow_only_what_is_quantized_when_told() -> None:
    nodes = [node("Transpose", ["x"], ["t"]), node("Neg", ["t"], ["y"])]
    model = build(nodes, {"x": [2, 3]}, ["y"])
    assert set(plan_of(model, effort="none").tensors) == {"x", "t"}
    told = {"quantize_passthrough_inputs": False}
    assert not plan_of(model, effort="none", placement=told).tensors


def test_concat_takes_the_range_of_its_output() -> None:
    nodes = [
        node("Tanh", ["x"], ["a"]),
        node("Sigmoid", ["x"], ["b"]),
        node("Concat", ["a", "b"], ["y"], axis=1),
    ]
    model = build(nodes, {"x": [2, 4]}, ["y"])
    assert _leaders(model, "a") == _leaders(model, "b") == ("y",)
    assert _leaders(model, "a", placement={"align_concat": False}) == ("a",)


def test_concat_behind_a_mover_keeps_the_mover_covered() -> None:
    """x is larger than what the Concat sees of it: its own range must have a say."""
    nodes = [
        node("MaxPool", ["x"], ["p"], kernel_shape=[2], strides=[2]),
        node("Tanh", ["z"], ["t"]),
        node("Concat", ["p", "t"], ["y"], axis=2),
    ]
    model = build(nodes, {"x": [1, 2, 8], "z": [1, 2, 4]}, ["y"])
    assert _leaders(model, "p") == ("y", "x")
    data = [{"x": np.full((1, 2, 8), -9, np.float32), "z": np.ones((1, 2, 4), np.float32)}]
    data[0]["x"][..., ::2] = 1  # the pool never sees -9
    stored = activations(quantize(model, data=data).model)
    assert {float(stored[name].scale) for name in "xpty"} == {float(np.float32(9 / 127))}


def test_a_table_and_its_rows_are_one() -> None:
    nodes = [
        node("Gather", ["table", "i"], ["rows"]),
        node("Concat", ["rows", "x"], ["y"], axis=0),
    ]
    table = normal(8, 4, scale=3.0)
    model = build(nodes, {"x": [2, 4]}, ["y"], {"table": table, "i": np.int64([0, 1])})
    changed = {"prepare": {"fold_constants": False}}
    result = quantize(model, **changed)
    stored = activations(result.model)
    scale = float(weights(result.model)["table"].scale)
    assert scale == float(stored["rows"].scale) == float(stored["y"].scale)
    assert scale >= np.abs(table).max() / 127 * (1 - 1e-6)


def test_softmax_gives_its_range_to_what_follows() -> None:
    nodes = [node("Softmax", ["x"], ["p"]), node("Transpose", ["p"], ["y"])]
    plan = plan_of(build(nodes, {"x": [2, 4]}, ["y"]))
    assert isinstance(plan.tensors["p"].source, Fixed)
    assert plan.tensors["y"].source == Shared(("p",))
    assert plan.observed_activations() == ("x",)


@pytest.mark.parametrize("recipe", ["a8w8", "u8s8_aaws"])
def test_a_relu_does_not_cut_what_lies_before_a_mover(recipe: str) -> None:
    """x is read by others and averaged: its negative values matter although a Relu comes later."""
    nodes = [
        node("AveragePool", ["x"], ["p"], kernel_shape=[2], strides=[2]),
        node("Relu", ["p"], ["r"]),
        node("MaxPool", ["x"], ["q"], kernel_shape=[2], strides=[2]),
        node("Clip", ["q", "low", "high"], ["s"]),
        node("Tanh", ["x"], ["t"]),
    ]
    constants = {"low": np.float32(-0.1), "high": np.float32(0.1)}
    model = build(nodes, {"x": [1, 4, 16]}, ["r", "s", "t"], constants)
    data = [{"x": normal(1, 4, 16, seed=i)} for i in range(4)]
    result = quantize(model, recipe, data)
    stored = activations(result.model)["x"]
    lowest = (np.iinfo(stored.dtype).min - float(stored.zero_point)) * float(stored.scale)
    assert lowest <= min(feed["x"].min() for feed in data) + float(stored.scale)
    assert sqnr(model, result, data) > 20


def test_a_pad_does_not_cut_what_lies_before_its_input() -> None:
    nodes = [
        node("MaxPool", ["x"], ["p"], kernel_shape=[2], strides=[2]),
        node("Pad", ["p", "pads"], ["y"]),
    ]
    model = build(nodes, {"x": [1, 2, 8]}, ["y"], {"pads": np.int64([0, 0, 1, 0, 0, 1])})
    assert plan_of(model, placement={"align_pad": True}).leaders("y") == ("y", "x")


@pytest.mark.parametrize("option", ["align_pool", "align_slice", "align_pad"])
def test_alignment_options(option: str) -> None:
    kind = {
        "align_pool": ("AveragePool", {"kernel_shape": [2]}, ["x"]),
        "align_slice": ("Slice", {}, ["x", "starts", "ends"]),
        "align_pad": ("Pad", {}, ["x", "pads"]),
    }[option]
    constants = {"starts": np.int64([0]), "ends": np.int64([1]), "pads": np.int64([0, 0, 1, 0, 0, 1])}
    constants = {name: value for name, value in constants.items() if name in kind[2]}
    model = build([node(kind[0], kind[2], ["y"], **kind[1])], {"x": [2, 3, 6]}, ["y"], constants)
    plan = plan_of(model, placement={option: True})
    assert plan.leaders("x") == plan.leaders("y")
    plan = plan_of(model)
    assert isinstance(plan.tensors["x"].source, Observed)
    assert isinstance(plan.tensors["y"].source, Observed)


def _conv_then(*tail: onnx.NodeProto, **constants: Any) -> onnx.ModelProto:
    nodes = [node("Conv", ["x", "w"], ["c"], name="conv"), *tail]
    return build(nodes, {"x": [1, 3, 6, 6]}, ["y"], {"w": normal(4, 3, 3, 3), **constants})


@pytest.mark.parametrize("op", ["Relu", "LeakyRelu", "PRelu"])
def test_no_pair_between_conv_and_its_activation(op: str) -> None:
    slope = {"s": np.float32([[[0.1]]])} if op == "PRelu" else {}
    model = _conv_then(node(op, ["c", *slope], ["y"], name="act"), **slope)
    plan = plan_of(model)
    assert "c" not in plan.tensors
    assert "compute as one" in plan.kept_float["c"]
    apart = plan_of(model, placement={"fuse_activations": False})
    assert "c" in apart.tensors
    if op == "Relu":
        assert apart.leaders("c") == ("y",), "what Relu cuts off needs no codes"


@pytest.mark.parametrize(("high", "fused"), [(6.0, True), (1.0, True), (4.0, False)])
def test_only_some_clips_fuse(high: float, fused: bool) -> None:
    model = _conv_then(node("Clip", ["c", "lo", "hi"], ["y"], name="clip"), lo=SCALAR(0.0), hi=SCALAR(high))
    assert ("c" not in plan_of(model).tensors) is fused


def test_a_tensor_with_two_readers_keeps_its_pair() -> None:
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Relu", ["c"], ["r"]),
        node("Add", ["c", "r"], ["y"]),
    ]
    model = build(nodes, {"x": [1, 3, 6, 6]}, ["y"], {"w": normal(4, 3, 1, 1)})
    for recipe in ("a8w8", "u8s8_aaws"):
        plan = plan_of(model, recipe)
        assert "c" in plan.tensors
        assert not plan.folded
        assert plan.leaders("c") == ("c",), "the negative values matter to Add"


RELU = (node("Relu", ["c"], ["y"], name="act"),)
FOLDING = ("u8s8_aaws", "s8s8_aaws")


@pytest.mark.parametrize("preset", FOLDING)
@pytest.mark.parametrize("method", ["minmax", "percentile", "entropy", "distribution", "mse"])
def test_a_folded_relu_still_cuts_at_zero(preset: str, method: str) -> None:
    model = _conv_then(*RELU)
    data = [{"x": normal(1, 3, 6, 6, seed=i)} for i in range(6)]
    folded = quantize(model, preset, data, calibration={"method": method})
    kept = quantize(model, preset, data, calibration={"method": method}, placement={"fold_relu": False})
    assert ops(folded.model) == ["Conv"]
    assert ops(kept.model) == ["Conv", "Relu"]
    assert_sound(model, folded.model)
    step = float(activations(folded.model)["y"].scale)
    for feed in data:
        [mine], [theirs] = run(folded.model, feed), run(kept.model, feed)
        assert mine.min() >= 0
        np.testing.assert_allclose(mine, theirs, atol=step * 1.01)


@pytest.mark.parametrize("preset", FOLDING)
def test_a_folded_relu_that_never_fired_still_cuts_at_zero(preset: str) -> None:
    nodes = [node("Conv", ["x", "w"], ["c"]), node("Relu", ["c"], ["y"])]
    model = build(nodes, {"x": [1, 1, 2, 2]}, ["y"], {"w": np.full((1, 1, 1, 1), -1, np.float32)})
    data = [{"x": np.full((1, 1, 2, 2), 5, np.float32)}]
    [out] = run(quantize(model, preset, data).model, data[0])
    np.testing.assert_array_equal(out, 0)


@pytest.mark.parametrize(
    "override",
    [
        {"tensors": ["y"], "type": "float"},
        {"tensors": ["y"], "symmetric": True},
        {"tensors": ["y"], "range": [-1.0, 4.0]},
        {"nodes": ["act"], "type": "float"},
    ],
)
def test_an_override_brings_a_folded_relu_back(override: dict[str, Any]) -> None:
    model = _conv_then(*RELU)
    data = [{"x": normal(1, 3, 6, 6, seed=i)} for i in range(3)]
    assert plan_of(model, "u8s8_aaws").folded == ("act",)
    result = quantize(model, "u8s8_aaws", data, overrides=[override])
    assert ops(result.model) == ["Conv", "Relu"]
    assert all(run(result.model, feed)[0].min() >= 0 for feed in data)


def test_a_relu_whose_scale_is_shared_with_negatives_stays() -> None:
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Relu", ["c"], ["r"], name="act"),
        node("Tanh", ["x"], ["t"]),
        node("Concat", ["r", "t"], ["y"], axis=1),
    ]
    model = build(nodes, {"x": [1, 3, 6, 6]}, ["y"], {"w": normal(4, 3, 1, 1)})
    assert plan_of(model, "u8s8_aaws").folded == ("act",)
    aligned = {"placement": {"align_concat": True}}
    assert plan_of(model, "u8s8_aaws", **aligned).folded == ()
    data = [{"x": normal(1, 3, 6, 6)}]
    assert sqnr(model, quantize(model, "u8s8_aaws", data, **aligned), data) > 30


@pytest.mark.parametrize(
    ("low", "high", "folds"),
    [(0.0, 6.0, True), (-1.0, 1.0, True), (0.5, 2.0, False), (-3.0, -1.0, False), (0.0, 0.0, True)],
)
def test_clips_fold_only_around_zero(low: float, high: float, folds: bool) -> None:
    model = _conv_then(node("Clip", ["c", "lo", "hi"], ["y"], name="act"), lo=SCALAR(low), hi=SCALAR(high))
    assert plan_of(model, "u8s8_aaws").folded == (("act",) if folds else ())


def test_a_clip_with_computed_bounds_stays() -> None:
    nodes = [node("Conv", ["x", "w"], ["c"]), node("Clip", ["c", "lo"], ["y"], name="act")]
    model = build(nodes, {"x": [1, 3, 4, 4], "lo": []}, ["y"], {"w": normal(4, 3, 1, 1)})
    assert plan_of(model, "u8s8_aaws").folded == ()
    data = [{"x": normal(1, 3, 4, 4), "lo": np.asarray(v, np.float32)} for v in (-0.5, 0.0)]
    assert "Clip" in ops(quantize(model, "u8s8_aaws", data).model)


def test_a_relu_that_must_stay_float_does_not_vanish() -> None:
    model = _conv_then(*RELU)
    plan = plan_of(model, "u8s8_aaws", placement={"skip_output_op_types": ["Relu"]})
    assert plan.folded == ()
    assert "y" not in plan.tensors


def test_two_relus_in_a_row() -> None:
    model = _conv_then(node("Relu", ["c"], ["r"]), node("Relu", ["r"], ["y"]))
    data = [{"x": normal(1, 3, 6, 6)}]
    result = quantize(model, "u8s8_aaws", data)
    assert_sound(model, result.model)
    assert set(activations(result.model)) == {"x", "y"}
    assert run(result.model, data[0])[0].min() >= 0
