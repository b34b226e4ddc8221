"""Biases: the accumulator's scale, overflow, other types, and shapes that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from helpers import activations, assert_sound, build, node, normal, plan_of, quantize, run, sqnr, weights
from roundel.plan.types import Derived


def _conv(weight: Any, bias: Any, group: int = 1) -> onnx.ModelProto:
    constants = {"w": np.asarray(weight, np.float32), "b": np.asarray(bias, np.float32)}
    nodes = [node("Conv", ["x", "w", "b"], ["y"], name="conv", group=group)]
    return build(nodes, {"x": [1, 3, 4, 4]}, ["y"], constants)


def test_the_plan_says_what_a_bias_derives_from() -> None:
    tensor = plan_of(_conv(normal(4, 3, 1, 1), normal(4))).tensors["b"]
    assert tensor.source == Derived("x", "w")
    assert str(tensor.source) == "derived from x x w"


@pytest.mark.parametrize("per_channel", [False, True])
def test_a_huge_bias_widens_its_weight(per_channel: bool) -> None:
    """Tiny weights: without care the codes of the bias would need more than 32 bits."""
    bias = np.float32([1e4, -2e4, 0.5, 0])
    model = _conv(normal(4, 3, 1, 1, scale=1e-8), bias)
    result = quantize(model, weights={"per_channel": per_channel})
    stored = weights(result.model)
    np.testing.assert_allclose(stored["b"].real, bias, rtol=1e-6, atol=1e-4)
    x = activations(result.model)["x"].scale.astype(np.float64)
    np.testing.assert_array_equal(stored["b"].scale, (x * stored["w"].scale).astype(np.float32))
    assert any("would overflow 32 bits" in note for note in result.record.notes)
    assert_sound(model, result.model)
    feed = {"x": normal(1, 3, 4, 4)}
    np.testing.assert_allclose(run(result.model, feed)[0], run(model, feed)[0], rtol=0.02, atol=200)


def test_only_the_channels_that_need_it_are_widened() -> None:
    weight = normal(4, 3, 1, 1)
    weight[0] *= 1e-8
    result = quantize(_conv(weight, [1e4, 1, 1, 1]), weights={"per_channel": True})
    plain = np.abs(weight).max((1, 2, 3)) / 127
    scale = weights(result.model)["w"].scale
    np.testing.assert_allclose(scale[1:], plain[1:], rtol=1e-6)
    assert scale[0] > plain[0] * 10


@pytest.mark.parametrize("channel", [0, 1, 3])
def test_a_dead_channel_keeps_its_bias(channel: int) -> None:
    weight, bias = normal(4, 3, 1, 1), normal(4)
    weight[channel] = 0
    model = _conv(weight, bias)
    data = [{"x": normal(1, 3, 4, 4, seed=i)} for i in range(3)]
    result = quantize(model, data=data, weights={"per_channel": True})
    step = float(weights(result.model)["b"].scale[channel])
    assert abs(weights(result.model)["b"].real[channel] - bias[channel]) <= step / 2
    assert sqnr(model, result, data) > 30


def test_all_zero_weights_and_data() -> None:
    model = _conv(np.zeros((4, 3, 1, 1)), [1, 2, 3, 4])
    data = [{"x": np.zeros((1, 3, 4, 4), np.float32)}]
    result = quantize(model, data=data)
    [out] = run(result.model, data[0])
    np.testing.assert_allclose(out[0, :, 0, 0], [1, 2, 3, 4], atol=0.6)


def test_int16_biases() -> None:
    model = _conv(normal(4, 3, 1, 1), normal(4, scale=0.1))
    result = quantize(model, bias={"type": "int16"})
    assert weights(result.model)["b"].dtype == "int16"
    assert weights(result.model)["b"].domain == "com.microsoft"
    large = quantize(_conv(normal(4, 3, 1, 1), [1e3, 0, 0, 0]), bias={"type": "int16"})
    assert weights(large.model)["b"].dtype == "int32"
    assert any("does not fit 16 bits" in note for note in large.record.notes)


def test_float_biases() -> None:
    model = _conv(normal(4, 3, 1, 1), normal(4))
    result = quantize(model, bias={"type": "float"})
    assert set(weights(result.model)) == {"w"}
    assert_sound(model, result.model)


@pytest.mark.parametrize("kind", ["int32", "int8"])
def test_a_computed_bias_is_an_activation(kind: str) -> None:
    nodes = [node("Tanh", ["z"], ["b"]), node("Conv", ["x", "w", "b"], ["y"])]
    model = build(nodes, {"x": [1, 3, 4, 4], "z": [4]}, ["y"], {"w": normal(4, 3, 1, 1)})
    result = quantize(model, bias={"type": kind})
    assert "b" in activations(result.model)
    assert_sound(model, result.model)


def test_a_shared_bias_serves_both() -> None:
    nodes = [
        node("Conv", ["x", "w", "b"], ["a"], name="first"),
        node("Conv", ["a", "v", "b"], ["y"], name="second"),
    ]
    constants = {"w": normal(3, 3, 1, 1), "v": normal(3, 3, 1, 1, seed=1), "b": normal(3, scale=5.0)}
    model = build(nodes, {"x": [1, 3, 4, 4]}, ["y"], constants)
    data = [{"x": normal(1, 3, 4, 4, seed=i)} for i in range(3)]
    for changes in ({}, {"prepare": {"unshare_biases": False}}):
        result = quantize(model, data=data, **changes)
        assert_sound(model, result.model)
        assert sqnr(model, result, data) > 30


def test_one_constant_as_bias_and_as_operand() -> None:
    nodes = [node("Conv", ["x", "w", "b"], ["c"]), node("Mul", ["c", "b"], ["y"])]
    model = build(nodes, {"x": [1, 3, 4, 4]}, ["y"], {"w": normal(4, 3, 1, 1), "b": normal(4)})
    data = [{"x": normal(1, 3, 4, 4, seed=i)} for i in range(3)]
    result = quantize(model, data=data)
    assert_sound(model, result.model)
    assert sqnr(model, result, data) > 30
