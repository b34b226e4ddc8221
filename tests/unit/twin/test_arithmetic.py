"""The twin against whole numbers in numpy: layers of every kind, sums beyond float32, products, pools."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import roundel
from helpers import rng
from npu_files import QdqNet, codes

Ints = NDArray[np.int64]


def _half_up(sums: NDArray[Any], shift: int) -> Ints:
    """floor(sum / 2**shift + 1/2), saturated, as a code without zero point; in whole numbers."""
    wide = np.asarray(sums, object)
    if shift <= 0:
        made = wide * 2**-shift
    else:
        made = (wide + 2 ** (shift - 1)) // 2**shift
    return np.clip(made.astype(np.int64), -128, 127)


def _plain_sums(op: str, data: Ints, weight: Ints, **attributes: Any) -> Ints:
    """Sums of products in float64, which holds them all."""
    groups = attributes.get("group", 1)
    if op == "ConvTranspose" and groups > 1:  # ONNX's reference refuses it
        parts = zip(np.split(data, groups, axis=1), np.split(weight, groups), strict=True)
        return np.concatenate(
            [_plain_sums(op, *part, **{**attributes, "group": 1}) for part in parts], axis=1
        )
    inputs = [helper.make_tensor_value_info(name, TensorProto.DOUBLE, None) for name in "xw"]
    output = helper.make_tensor_value_info("y", TensorProto.DOUBLE, None)
    graph = helper.make_graph(
        [helper.make_node(op, ["x", "w"], ["y"], **attributes)], "sums", inputs, [output]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    feed = {"x": data.astype(np.float64), "w": weight.astype(np.float64)}
    return np.asarray(ReferenceEvaluator(model).run(None, feed)[0]).astype(np.int64)


def _check(net: QdqNet, feed: Ints, position: int, expected: Ints) -> roundel.NpuSession:
    """Run the net on whole numbers and compare every code."""
    session = roundel.npu_session(net.model())
    made = session.run(None, {"x": feed.astype(np.float32)})[0]
    np.testing.assert_array_equal(codes(made, position).astype(np.int64) - 128, expected)
    return session


_LAYERS = {
    "3x3": ("Conv", (8, 6, 3, 3), {"pads": [1] * 4, "kernel_shape": [3, 3]}),
    "strided": ("Conv", (8, 6, 3, 3), {"pads": [1] * 4, "strides": [2, 2], "kernel_shape": [3, 3]}),
    "grouped": ("Conv", (8, 3, 3, 3), {"group": 2, "kernel_shape": [3, 3]}),
    "depthwise": ("Conv", (6, 1, 5, 5), {"group": 6, "pads": [2] * 4, "kernel_shape": [5, 5]}),
    "transposed": ("ConvTranspose", (6, 4, 2, 2), {"strides": [2, 2], "kernel_shape": [2, 2]}),
    "transposed in groups": ("ConvTranspose", (6, 2, 3, 3), {"group": 2, "kernel_shape": [3, 3]}),
}


@pytest.mark.parametrize("kind", _LAYERS)
@pytest.mark.parametrize(("cut", "bias_position"), [(1, -3), (7, 1), (9, 0), (16, -12)])
@pytest.mark.parametrize("after", ["", "Relu", "Clip"])
def test_layers(kind: str, cut: int, bias_position: int, after: str) -> None:
    op, shape, attributes = _LAYERS[kind]
    random = rng(cut)
    data = random.integers(-128, 128, (1, 6, 9, 9))
    weight = random.integers(-127, 128, shape)
    outputs = shape[0] if op == "Conv" else shape[1] * int(attributes.get("group", 1))
    bias = random.integers(-127, 128, outputs)
    net = QdqNet(*data.shape)
    net.layer(op, weight, bias, (0, bias_position), **attributes)
    if after == "Relu":
        net.add("Relu", net.x)
    elif after == "Clip":
        net.add("Clip", net.x, net.const(0), net.const(6 * 2.0**cut))
    net.pair(-cut)
    # In units of half a bias step, so that all stay whole.
    fine = max(bias_position, 0)
    sums = _plain_sums(op, data, weight, **attributes) << fine
    sums = sums + (bias.reshape(1, -1, 1, 1) << (fine - bias_position))
    expected = _half_up(sums, cut + fine)
    if after:
        expected = np.clip(expected, 0, 6 if after == "Clip" else 127)
    assert _check(net, data, -cut, expected).summary.exact_share == (op == "Conv")


@pytest.mark.parametrize("channels", [128, 400, 1200])
@pytest.mark.parametrize("cut", [9, 16])
def test_sums_beyond_24_bits(channels: int, cut: int) -> None:
    """Float32 alone would round them; ties and near ties come from many large terms that cancel."""
    random = rng(channels)
    data = random.choice([-128, 127, 101], (1, channels, 5, 5))
    weight = random.choice([-127, 127, 89, -3], (4, channels, 3, 3))
    net = QdqNet(*data.shape)
    bias = random.integers(-127, 128, 4)
    net.layer("Conv", weight, bias, (0, -2), pads=[1] * 4, kernel_shape=[3, 3])
    net.pair(-cut)
    sums = _plain_sums("Conv", data, weight, pads=[1] * 4, kernel_shape=[3, 3])
    _check(net, data, -cut, _half_up(sums + (bias.reshape(1, -1, 1, 1) << 2), cut))


def test_gemm_and_flatten() -> None:
    random = rng(5)
    data, weight = random.integers(-128, 128, (1, 40)), random.integers(-127, 128, (7, 40))
    net = QdqNet(*data.shape)
    bias = random.integers(-127, 128, 7)
    net.layer("Gemm", weight, bias, (0, 0), transB=1)
    net.pair(-8)
    session = _check(net, data, -8, _half_up(data @ weight.T + bias, 8))
    assert session.summary.exact_share == 0
    assert "Gemm" in session.summary.assumed


@pytest.mark.parametrize("op", ["Add", "Sub", "Mul"])
@pytest.mark.parametrize("positions", [(0, 3, -1), (2, 2, -3), (4, -2, -3)])
def test_two_operands(op: str, positions: tuple[int, int, int]) -> None:
    first, second, out = positions
    data = rng(3).integers(-128, 128, (1, 4, 8, 8))
    net = QdqNet(*data.shape)
    left = net.pair(first, "x")
    right = net.pair(second, "x")
    net.add(op, left, right)
    net.pair(out)
    # The CPU quantizes the graph's inputs: halves to even.
    a, b = (np.clip(np.rint(data * 2.0**p), -128, 127).astype(np.int64) for p in (first, second))
    top = max(first, second)
    if op == "Mul":
        expected = _half_up(a * b, first + second - out)
    else:
        left_steps, right_steps = a << (top - first), b << (top - second)
        expected = _half_up(left_steps + (right_steps if op == "Add" else -right_steps), top - out)
    _check(net, data, out, expected)


@pytest.mark.parametrize("with_gain", [True, False])
@pytest.mark.parametrize(("side", "k", "n"), [(7, 21, 10), (3, 7, 6), (4, 1, 4)])
def test_average_pools(side: int, k: int, n: int, with_gain: bool) -> None:
    data = rng(side).integers(-128, 128, (1, 5, side, side))
    net = QdqNet(*data.shape)
    net.add("GlobalAveragePool", net.x)
    if with_gain:
        net.add("Mul", net.x, net.const(side * side * k / 2**n))
    net.pair(0)
    expected = _half_up(data.sum(axis=(2, 3), keepdims=True) * k, n)
    session = _check(net, data, 0, expected)
    assert "GlobalAveragePool" in session.summary.assumed


def test_windows_of_an_average_pool() -> None:
    data = rng(4).integers(-128, 128, (1, 2, 6, 6))
    net = QdqNet(*data.shape)
    net.add("AveragePool", net.x, kernel_shape=[3, 3], strides=[3, 3])
    net.pair(0)
    sums = data.reshape(1, 2, 2, 3, 2, 3).sum(axis=(3, 5))
    _check(net, data, 0, _half_up(sums * 7, 6))


@pytest.mark.parametrize("with_gain", [True, False])
def test_hard_sigmoid(with_gain: bool) -> None:
    data = np.arange(-128, 128).reshape(1, 1, 16, 16)
    net = QdqNet(*data.shape)
    net.pair(4, net.add("Mul", net.x, net.pair(4, net.const(2.0**-4))))
    net.add("HardSigmoid", net.x, alpha=1 / 6, beta=0.5)
    if with_gain:
        net.add("Mul", net.x, net.const(2731 * 6 / 16384))
    net.pair(7)
    expected = _half_up(np.clip(data + 48, 0, 96) * 2731, 14 + 4 - 7)
    _check(net, data, 7, expected)


def test_leaky_relu_has_a_slope_in_steps_of_256() -> None:
    data = np.arange(-128, 128).reshape(1, 1, 16, 16)
    net = QdqNet(*data.shape)
    net.layer("Conv", np.full((1, 1, 1, 1), 3), None, (0, 0))
    net.add("LeakyRelu", net.x, alpha=0.1)
    net.pair(-1)
    expected = _half_up(np.where(data > 0, 3 * data * 256, 3 * data * 26), 8 + 1)
    _check(net, data, -1, expected)


def test_moved_codes_stay_as_they_are() -> None:
    data = rng(6).integers(-128, 128, (1, 2, 8, 8))
    net = QdqNet(*data.shape)
    pooled = net.pair(0, net.add("MaxPool", net.x, kernel_shape=[2, 2], strides=[2, 2]))
    net.pair(0, net.add("Concat", pooled, pooled, axis=1))
    expected = np.concatenate([data.reshape(1, 2, 4, 2, 4, 2).max(axis=(3, 5))] * 2, axis=1)
    session = _check(net, data, 0, expected)
    assert not session.summary.assumed
