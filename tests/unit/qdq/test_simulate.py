"""What the NPU computes otherwise than ONNX, written into the graph: each option alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from helpers import Feed, assert_sound, build, feeds, initializers, node, normal, ops, quantize, rng, run
from roundel.numerics.affine import pool_gain, reciprocal_gain
from roundel.recipe.settings import Npu
from roundel.result import QuantizeResult

ALL_OFF = dict.fromkeys(
    (
        "leaky_relu",
        "sigmoid_to_hard_sigmoid",
        "hard_sigmoid",
        "average_pool",
        "reduce_mean",
        "softmax",
        "instance_norm",
        "clip",
        "clip_to_relu",
    ),
    False,
)
NO_LIMITS = {name: False for name in Npu.model_fields if name.startswith("adjust_")}
SHAPE = [1, 2, 8, 8]


def only(
    model: onnx.ModelProto, option: str, data: list[Feed] | None = None, **changes: Any
) -> QuantizeResult:
    """XINT8 with one option of the simulation."""
    result = quantize(model, "xint8", data, npu=ALL_OFF | {option: True}, **changes)
    assert_sound(model, result.model)
    return result


def one(
    op: str, shape: list[int], constants: dict[str, Any] | None = None, opset: int = 17, **attributes: Any
) -> onnx.ModelProto:
    """A model of a single node."""
    inputs = ["x", *(constants or {})]
    return build([node(op, inputs, ["y"], "n", **attributes)], {"x": shape}, ["y"], constants, opset=opset)


def gains(model: onnx.ModelProto) -> list[float]:
    """The constants of the Mul nodes that the simulation put in, each right behind its node."""
    constants = initializers(model)
    found = [n for n in model.graph.node if n.op_type == "Mul" and n.input[1] in constants]
    return [float(constants[n.input[1]]) for n in found]


@pytest.mark.parametrize(
    ("side", "gain"),
    [
        (3, 63 / 64),
        (5, 250 / 256),
        (6, 252 / 256),
        (7, 1029 / 1024),
        (14, 4116 / 4096),
        (9, 81 * 101 / 8192),
        (10, 100 * 82 / 8192),
        (255, reciprocal_gain(255 * 255)),
        (256, 1.0),
        (1, 1.0),
        (2, 1.0),
        (8, 1.0),
    ],
)
def test_gain_of_a_square_pool(side: int, gain: float) -> None:
    assert pool_gain(side, side) == gain


def test_reciprocal_is_the_first_best_of_its_length() -> None:
    """k / 2**n next to 1 / count, for n up to 6 + log2 of the count; exact for powers of two."""
    for count in (*range(1, 300), 1000, 65025):
        longest = 6 + int(np.ceil(np.log2(count)))
        errors = [abs(round(2**n / count) / 2**n - 1 / count) for n in range(longest + 1)]
        best = int(np.argmin(errors))
        assert reciprocal_gain(count) == count * round(2**best / count) / 2**best
        assert abs(reciprocal_gain(count) - 1) <= 2**-7
        assert (reciprocal_gain(count) == 1) == (count & (count - 1) == 0)


@pytest.mark.parametrize(("side", "gain"), [(3, 0.984375), (5, 0.9765625), (6, 0.984375), (7, 1.0048828125)])
@pytest.mark.parametrize("op", ["AveragePool", "GlobalAveragePool"])
def test_average_pool(op: str, side: int, gain: float) -> None:
    size, attributes = (8, {"kernel_shape": [side, side]}) if op == "AveragePool" else (side, {})
    model = one(op, [1, 2, size, size], **attributes)
    result = only(model, "average_pool")
    assert gains(result.model) == [gain]
    assert ops(result.model) == [op, "Mul"]
    assert f"{op} gain: 1 nodes" in result.record.notes
    assert gains(quantize(model, "xint8", npu=ALL_OFF).model) == []


@pytest.mark.parametrize("kernel", [[2, 2], [4, 4], [2, 3], [1, 3]])
def test_pools_without_a_gain(kernel: list[int]) -> None:
    """Powers of two divide exactly, and the table is for square kernels."""
    assert gains(only(one("AveragePool", SHAPE, kernel_shape=kernel), "average_pool").model) == []


def test_gain_stands_before_a_fused_activation() -> None:
    nodes = [node("GlobalAveragePool", ["x"], ["p"], "n"), node("Relu", ["p"], ["y"], "r")]
    model = build(nodes, {"x": [1, 2, 3, 3]}, ["p", "y"])
    assert ops(only(model, "average_pool").model) == ["GlobalAveragePool", "Mul", "Relu"]
    alone = build(nodes, {"x": [1, 2, 3, 3]}, ["y"])
    written = only(alone, "average_pool").model
    assert [n.op_type for n in written.graph.node[2:-2]] == ["GlobalAveragePool", "Mul", "Relu"]


@pytest.mark.parametrize("opset", [17, 18])
@pytest.mark.parametrize(("axes", "count"), [([1], 5), ([-1], 7), ([1, 3], 35)])
def test_reduce_mean(opset: int, axes: list[int], count: int) -> None:
    where = {"constants": {"axes": np.array(axes)}} if opset == 18 else {"axes": axes}
    model = one("ReduceMean", [1, 5, 4, 7], opset=opset, **where)
    result = only(model, "reduce_mean")
    assert gains(result.model) == [np.float32(reciprocal_gain(count))]
    assert gains(only(model, "average_pool").model) == []


def test_leaky_relu_slope() -> None:
    def slope(model: onnx.ModelProto) -> float:
        (found,) = (n for n in model.graph.node if n.op_type == "LeakyRelu")
        return next(float(a.f) for a in found.attribute if a.name == "alpha")

    assert slope(only(one("LeakyRelu", SHAPE, alpha=0.1), "leaky_relu").model) == 26 / 256
    default = build([node("LeakyRelu", ["x"], ["y"], "n")], {"x": SHAPE}, ["y"])
    assert slope(only(default, "leaky_relu").model) == 3 / 256
    assert slope(only(one("LeakyRelu", SHAPE, alpha=0.1), "clip").model) == pytest.approx(0.1)


def test_hard_sigmoid() -> None:
    model = one("HardSigmoid", SHAPE, alpha=1 / 6, beta=0.5)
    assert gains(only(model, "hard_sigmoid").model) == [16386 / 16384]
    other = one("HardSigmoid", SHAPE, alpha=0.2, beta=0.5)
    assert gains(only(other, "hard_sigmoid").model) == []


def test_sigmoid_becomes_hard_sigmoid() -> None:
    model = one("Sigmoid", SHAPE)
    written = only(model, "sigmoid_to_hard_sigmoid").model
    assert ops(written) == ["HardSigmoid"]
    (found,) = (n for n in written.graph.node if n.op_type == "HardSigmoid")
    attributes = {a.name: helper.get_attribute_value(a) for a in found.attribute}
    assert attributes == {"alpha": float(np.float32(1 / 6)), "beta": 0.5}
    both = quantize(model, "xint8", npu=ALL_OFF | {"sigmoid_to_hard_sigmoid": True, "hard_sigmoid": True})
    assert gains(both.model) == [16386 / 16384]
    assert ops(only(model, "hard_sigmoid").model) == ["Sigmoid"]


@pytest.mark.parametrize("opset", [17, 18, 21])
@pytest.mark.parametrize("axis", [-1, 1])
def test_softmax_in_bfloat16(opset: int, axis: int) -> None:
    """Within 2 % of the float result: seven bits in each step, and a cubic for the exponential."""
    model = one("Softmax", [2, 5, 6], opset=opset, axis=axis)
    data = feeds({"x": [2, 5, 6]}, scale=4.0)
    # Kept from the quantizer, the difference is that of the arithmetic alone.
    wide = {"activations": {"type": "int16", "scale": "float"}, "weights": {"scale": "float"}}
    changes = {"placement": {"domain": "auto"}, **wide}
    result = quantize(model, "xint8", data, npu=ALL_OFF | NO_LIMITS | {"softmax": True}, **changes)
    assert "Softmax" not in ops(result.model)
    assert ops(result.model)[0] == "ReduceMax"
    onnx.checker.check_model(result.model, full_check=True)
    for feed in data:
        expected, found = run(model, feed)[0], run(result.model, feed)[0]
        np.testing.assert_allclose(found, expected, rtol=0.02, atol=1e-3)
        np.testing.assert_allclose(found.sum(axis), 1, rtol=0.02)


@pytest.mark.parametrize("opset", [17, 18, 21])
@pytest.mark.parametrize("shape", [[2, 3, 5, 5], [2, 3, 9]])
def test_instance_norm_in_bfloat16(opset: int, shape: list[int]) -> None:
    """Within 3 % of the largest value: eight steps of seven bits."""
    constants = {"scale": normal(3, seed=1), "bias": normal(3, seed=2)}
    model = one("InstanceNormalization", shape, constants, opset=opset, epsilon=1e-3)
    data = feeds({"x": shape}, scale=2.0)
    wide = {
        "activations": {"type": "int16", "scale": "float"},
        "weights": {"type": "int16", "scale": "float"},
    }
    changes = {"placement": {"domain": "auto"}, "bias": {"type": "float"}, **wide}
    result = quantize(model, "xint8", data, npu=ALL_OFF | NO_LIMITS | {"instance_norm": True}, **changes)
    assert "InstanceNormalization" not in ops(result.model)
    assert "InstanceNormalization in bfloat16: 1 nodes" in result.record.notes
    onnx.checker.check_model(result.model, full_check=True)
    for feed in data:
        expected, found = run(model, feed)[0], run(result.model, feed)[0]
        np.testing.assert_allclose(found, expected, atol=0.03 * np.abs(expected).max())


def clipped(low: float, high: float, outputs: list[str] | None = None) -> onnx.ModelProto:
    constants = {"w": normal(3, 2, 3, 3), "low": np.float32(low), "high": np.float32(high)}
    nodes = [node("Conv", ["x", "w"], ["c"], "n"), node("Clip", ["c", "low", "high"], ["y"], "k")]
    return build(nodes, {"x": SHAPE}, outputs or ["y"], constants)


def test_clip_bounds_become_whole() -> None:
    def bounds(model: onnx.ModelProto) -> list[float]:
        constants = initializers(model)
        (found,) = (n for n in model.graph.node if n.op_type == "Clip")
        return [float(constants[name]) for name in found.input[1:]]

    assert bounds(only(clipped(-0.7, 2.5), "clip").model) == [-1, 2]
    assert bounds(only(clipped(-300, 300), "clip").model) == [-128, 127]
    assert bounds(only(clipped(-0.5, 2.5), "leaky_relu").model) == [-0.5, 2.5]


@pytest.mark.parametrize("recipe", ["xint8", "xint8_signed", "a8w8", "u8s8_aaws"])
def test_saturating_clip_becomes_relu(recipe: str) -> None:
    """The bound is the top of the range: 127 * 2**-6 for powers of two, the observed maximum otherwise."""
    model = clipped(0, 127 / 64)
    data = feeds({"x": SHAPE}, scale=3.0)
    before = quantize(model, recipe, data, placement={"fold_relu": False}).model
    result = quantize(model, recipe, data, placement={"fold_relu": False}, npu={"clip_to_relu": True})
    assert_sound(model, result.model)
    assert ops(before) == ["Conv", "Clip"]
    assert ops(result.model) == ["Conv", "Relu"]
    assert "Clip to Relu: 1 nodes" in result.record.notes
    for feed in data:
        np.testing.assert_array_equal(run(before, feed)[0], run(result.model, feed)[0])
        assert run(before, feed)[0].max() == pytest.approx(127 / 64, rel=1e-5)


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (0, 6),  # the range ends at 127 / 16
        (-1, 127 / 64),
        (0.5, 127 / 64),
    ],
)
def test_clip_that_saturation_does_not_replace(low: float, high: float) -> None:
    result = only(clipped(low, high), "clip_to_relu", feeds({"x": SHAPE}, scale=3.0))
    assert ops(result.model) == ["Conv", "Clip"]


def test_clip_stays_where_its_float_result_is_read() -> None:
    """The body of an If reads the value itself, not what was stored: there nothing saturates."""
    proto = clipped(0, 127 / 64)
    branches = []
    for op in ("Identity", "Neg"):
        info = helper.make_tensor_value_info(f"{op}_out", onnx.TensorProto.FLOAT, [1, 3, 6, 6])
        branches.append(helper.make_graph([node(op, ["y"], [f"{op}_out"], op)], op, [], [info]))
    nodes = [
        *proto.graph.node,
        node("Relu", ["y"], ["z"], "r"),
        node("If", ["flag"], ["i"], "f", then_branch=branches[0], else_branch=branches[1]),
    ]
    constants = initializers(proto) | {"flag": np.array(True)}
    model = build(nodes, {"x": SHAPE}, ["z", "i"], constants)
    data = feeds({"x": SHAPE}, scale=3.0)
    written = only(model, "clip_to_relu", data).model
    assert run(written, data[0])[1].max() <= np.float32(127 / 64)


def test_nothing_is_simulated_at_excluded_nodes() -> None:
    nodes = [node("Conv", ["x", "w"], ["c"], "n"), node("GlobalAveragePool", ["c"], ["y"], "p")]
    model = build(nodes, {"x": [1, 2, 5, 5]}, ["y"], {"w": normal(3, 2, 3, 3)})
    result = quantize(model, "xint8", selection={"exclude": ["p"]})
    assert gains(result.model) == []
    assert gains(quantize(model, "xint8").model) == [63 / 64]


def test_everything_at_once_is_sorted_and_sound() -> None:
    nodes = [
        node("Conv", ["x", "w"], ["c"], "n", pads=[1] * 4),
        node("HardSwish", ["c"], ["h"], "h"),
        node("AveragePool", ["h"], ["p"], "p", kernel_shape=[3, 3]),
        node("Sigmoid", ["p"], ["s"], "s"),
        node("Mul", ["s", "p"], ["m"], "m"),
        node("GlobalAveragePool", ["m"], ["g"], "g"),
        node("LeakyRelu", ["g"], ["y"], "l", alpha=0.2),
    ]
    constants = {"w": (rng().standard_normal((4, 2, 3, 3))).astype(np.float32)}
    model = build(nodes, {"x": SHAPE}, ["y", "p"], constants)
    result = quantize(model, "xint8")
    assert_sound(model, result.model)
    assert len(gains(result.model)) == 4
