"""Where values are bounded: channels under a Clip, channels that are constant, biases that can move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from equalize_cases import check_equalized
from helpers import build, feeds, node, normal
from roundel.improve.channels import rescalable
from roundel.improve.equalize import EqualizeReport, equalize
from roundel.model.session import open_session
from roundel.passes.shapes import refresh_shapes
from roundel.recipe.load import load_recipe
from roundel.recipe.settings import Equalize
from roundel.stages import prepare

X = {"x": (1, 4, 8, 8)}
SIX = {"lo": np.float32(0), "hi": np.float32(6)}
SHARED = Path(__file__).parents[4] / "shared" / "models"
CONVOLUTIONAL = (
    *("cifar10_resnet20", "mobilenet_v2", "mobilenet_v2_imagenet"),
    *("mobilenet_v3_small", "ssdlite_mobilenet_v2_coco"),
)


def equalized(proto: onnx.ModelProto, **options: Any) -> tuple[EqualizeReport, dict[str, Any]]:
    """Equalize, prove that nothing changed, and return the constants by name."""
    before = ir.from_proto(proto)
    refresh_shapes(before)
    after = before.clone()
    report = equalize(after, Equalize(**options), power_of_two=False)
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in proto.graph.input}
    for scale in (0.01, 1.0, 100.0, 1e5):
        assert check_equalized(before, after, feeds(shapes, 3, scale)) < 1e-5
    values = {name: v.const_value.numpy() for name, v in after.graph.initializers.items() if v.const_value}
    return report, values


def mobile(
    depthwise: Any, bias: Any, stem_bias: Any = None, act: str = "Clip", **attributes: Any
) -> onnx.ModelProto:
    """Conv, ReLU6, depthwise Conv, ReLU6, Conv."""
    bounds = ["lo", "hi"] if act == "Clip" else []
    return build(
        [
            node("Conv", ["x", "w0", "b0"], ["a"]),
            node("Clip", ["a", "lo", "hi"], ["r"]),
            node("Conv", ["r", "w1", "b1"], ["d"], group=4, **attributes),
            node(act, ["d", *bounds], ["q"]),
            node("Conv", ["q", "w2", "b2"], ["y"]),
        ],
        X,
        ["y"],
        {
            **SIX,
            "w0": normal(4, 4, 1, 1),
            "b0": np.float32([1, 1, 1, 1]) if stem_bias is None else np.float32(stem_bias),
            "w1": np.float32(depthwise).reshape(4, 1, 1, 1) * np.ones((1, 1, 3, 3), np.float32),
            "b1": np.float32(bias),
            "w2": normal(3, 4, 1, 1, seed=1),
            "b2": normal(3, seed=2),
        },
    )


def test_small_channels_grow_up_to_the_bound() -> None:
    report, after = equalized(mobile([1.0, 1e-3, 1e-4, -1e-3], [0, 0, 0, 0.5], pads=[1] * 4))
    grown = after["w1"][:, 0, 0, 0] / np.float32([1.0, 1e-3, 1e-4, -1e-3])
    assert grown[0] == 1  # the Clip acts on it
    assert grown[1] > 5
    assert grown[2] > grown[1]
    for channel, top in ((1, 9 * 6e-3), (2, 9 * 6e-4), (3, 0.5)):
        assert grown[channel] * top <= 6.001
    assert report.channels == 3


def test_the_bound_of_a_channel_that_might_be_cut_is_not_moved() -> None:
    report, after = equalized(mobile([0.2, 0.2, 0.3, 0.5], [0, 0, 0, 0]))
    assert report.channels == 0
    assert (after["w1"][:, 0, 0, 0] == np.float32([0.2, 0.2, 0.3, 0.5])).all()


@pytest.mark.parametrize(("low", "high"), [(-4.0, 4.0), (-1e6, 1e6), (0.0, 1e6)])
def test_other_bounds(low: float, high: float) -> None:
    proto = build(
        [
            node("Tanh", ["x"], ["t"]),
            node("Conv", ["t", "w0", "b0"], ["a"]),
            node("Clip", ["a", "lo", "hi"], ["c"]),
            node("Conv", ["c", "w1"], ["y"]),
        ],
        X,
        ["y"],
        {
            "w0": normal(5, 4, 3, 3) * np.float32([0.01, 0.02, 0.1, 1, 2]).reshape(5, 1, 1, 1),
            "b0": normal(5, seed=1) * np.float32(0.1),
            "w1": normal(2, 5, 1, 1, seed=2),
            "lo": np.float32(low),
            "hi": np.float32(high),
        },
    )
    report, _ = equalized(proto)
    assert report.channels >= 3


def test_the_lower_bound_limits_too() -> None:
    proto = build(
        [
            node("Tanh", ["x"], ["t"]),
            node("Conv", ["t", "w0", "b0"], ["a"]),
            node("Clip", ["a", "lo", "hi"], ["c"]),
            node("Conv", ["c", "w1"], ["y"]),
        ],
        X,
        ["y"],
        {
            "w0": np.full((2, 4, 1, 1), [[[[0.001]]], [[[1.0]]]], np.float32),
            "b0": np.float32([-3, 0]),
            "w1": np.float32([[100, 1]]).reshape(1, 2, 1, 1),
            "lo": np.float32(-4),
            "hi": np.float32(4),
        },
    )
    _, after = equalized(proto, append_bias=False)
    np.testing.assert_allclose(after["b0"][0], -3 * 4 / 3.004, rtol=1e-4)


def test_a_channel_that_is_always_zero_leaves_all_its_layers() -> None:
    proto = mobile([1.0, 40.0, 1.0, 1.0], [0.1, -1, 0, 0], pads=[1] * 4)
    weights = {t.name: t for t in proto.graph.initializer}
    dead = onnx.numpy_helper.to_array(weights["w0"]).copy()
    dead[1] = 1e-20
    weights["w0"].CopyFrom(onnx.numpy_helper.from_array(dead, "w0"))
    bias = onnx.numpy_helper.from_array(np.float32([1, -0.5, 1, 1]), "b0")
    weights["b0"].CopyFrom(bias)
    report, after = equalized(proto)
    assert report.silenced == 2
    assert not after["w0"][1].any()
    assert not after["w1"][1].any()
    assert not after["w2"][:, 1].any()
    assert np.abs(after["w1"]).max() < 40
    before = {name: onnx.numpy_helper.to_array(tensor) for name, tensor in weights.items()}
    assert any(spread(before[name]) >= 40 and spread(after[name]) < 2 for name in ("w0", "w1", "w2"))


def spread(weight: np.ndarray) -> float:
    """Maximum over median of the ranges of the output channels that are not zero."""
    ranges = np.abs(weight).reshape(len(weight), -1).max(axis=1)
    return float(ranges.max() / np.median(ranges[ranges > 0]))


def test_a_channel_that_is_always_at_the_bound_becomes_a_bias() -> None:
    report, after = equalized(mobile([1.0, 5.0, 1.0, 1.0], [0, 7, 0, 0]))
    assert report.silenced == 1
    assert report.absorbed == 1
    assert not after["w1"][1].any()
    assert not after["w2"][:, 1].any()


@pytest.mark.parametrize("act", ["Relu", "Clip"])
def test_what_a_channel_has_at_least_moves_on(act: str) -> None:
    proto = mobile([0.01, 0.02, 1.0, -0.01], [3.0, 0.5, -1.0, 4.0], act=act)
    old = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    report, after = equalized(proto)
    assert report.absorbed == 3
    moved = np.float32([3.0, 0.5, 0, 4.0 - 9 * 0.06])
    np.testing.assert_allclose(after["b2"], old["b2"] + old["w2"][:, :, 0, 0] @ moved, rtol=1e-5)


def test_nothing_moves_past_a_bound_that_might_cut() -> None:
    proto = mobile([1.0, 1.0, 1.0, 1.0], [3.0, 0.5, 1.0, 4.0])
    assert equalized(proto)[0].absorbed == 0


def test_zeros_around_a_pool_lower_its_values() -> None:
    proto = build(
        [
            node("Sigmoid", ["x"], ["s"]),
            node("Conv", ["s", "w0", "b0"], ["a"]),
            node("AveragePool", ["a"], ["p"], kernel_shape=[3, 3], pads=[1] * 4, count_include_pad=1),
            node("Conv", ["p", "w1", "b1"], ["d"]),
            node("Relu", ["d"], ["y"]),
        ],
        X,
        ["y"],
        {
            "w0": np.full((4, 4, 1, 1), 1e-3, np.float32),
            "b0": np.full(4, 2, np.float32),
            "w1": np.full((3, 4, 1, 1), -0.25, np.float32),
            "b1": np.full(3, 1.5, np.float32),
        },
    )
    assert equalized(proto)[0].silenced == 0  # below zero inside, above it in the corners


def test_a_constant_that_others_read_stays() -> None:
    proto = mobile([1.0, -1.0, 1.0, 1.0], [0, -1, 0, 0])
    proto.graph.output.append(onnx.helper.make_tensor_value_info("d", 1, None))
    assert equalized(proto)[0].silenced == 0


def test_nothing_moves_into_a_layer_that_pads() -> None:
    proto = mobile([0.01, 0.02, 1.0, -0.01], [3.0, 0.5, -1.0, 4.0])
    proto.graph.node[-1].attribute.append(onnx.helper.make_attribute("pads", [1] * 4))
    del proto.graph.output[0].type.tensor_type.shape.dim[:]
    proto.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("y", 1, (1, 3, 8, 8)))
    report, _ = equalized(proto)
    assert report.absorbed == 0
    assert report.channels > 0


def test_a_reader_without_a_bias_gets_one_and_a_matmul_does_not() -> None:
    def net(last: onnx.NodeProto) -> onnx.ModelProto:
        return build(
            [
                node("Sigmoid", ["x"], ["s"]),
                node("Gemm", ["s", "w0", "b0"], ["a"]),
                node("Relu", ["a"], ["r"]),
                last,
            ],
            {"x": (2, 4)},
            ["y"],
            {"w0": normal(4, 5, scale=0.1), "b0": np.full(5, 3, np.float32), "w1": normal(5, 3, seed=1)},
        )

    assert equalized(net(node("Gemm", ["r", "w1"], ["y"])))[0].absorbed == 5
    assert equalized(net(node("MatMul", ["r", "w1"], ["y"])))[0].absorbed == 0


def layer_of(op: str, weight: Any, bias: Any, **attributes: Any) -> Any:
    shape = (
        (1, weight.shape[1] * attributes.get("group", 1), 6, 6) if weight.ndim == 4 else (2, weight.shape[0])
    )
    if op == "ConvTranspose":
        shape = (1, weight.shape[0], 6, 6)
    proto = build(
        [node(op, ["x", "w", "b"], ["y"], **attributes)], {"x": shape}, ["y"], {"w": weight, "b": bias}
    )
    return ir.from_proto(proto), shape


@pytest.mark.parametrize(
    ("op", "weight", "outputs", "attributes"),
    [
        ("Conv", (4, 3, 3, 3), 4, {}),
        ("Conv", (4, 3, 3, 3), 4, {"pads": [1] * 4}),
        ("Conv", (4, 1, 3, 3), 4, {"group": 2, "strides": [2, 2]}),
        ("ConvTranspose", (3, 4, 3, 3), 4, {"strides": [2, 2]}),
        ("ConvTranspose", (4, 2, 3, 3), 4, {"group": 2, "output_padding": [1, 1], "strides": [2, 2]}),
        ("Gemm", (5, 4), 4, {"alpha": -2.0, "beta": 0.5}),
    ],
)
@pytest.mark.parametrize("lowest", [-2.0, 1.0])
def test_bounds_hold_on_data(
    op: str, weight: tuple[int, ...], outputs: int, attributes: dict[str, Any], lowest: float
) -> None:
    model, shape = layer_of(op, normal(*weight), normal(outputs, seed=1), **attributes)
    layer = rescalable(next(iter(model.graph)))
    assert layer is not None
    size = len(layer.columns)
    low, high = np.linspace(lowest, 0.5, size), np.linspace(1.5, 3, size)
    below, above = layer.bounds(low, high)
    generator = np.random.default_rng(0)
    axes = (1, -1, *[1] * (len(shape) - 2))
    session = open_session(model)
    for _ in range(50):
        pick = generator.integers(0, 2, shape)
        x = np.where(pick, low.reshape(axes), high.reshape(axes)).astype(np.float32)
        y = session.run(None, {"x": x})[0]
        flat = np.moveaxis(y, 1, 0).reshape(outputs, -1)
        assert (flat.max(axis=1) <= above + 1e-4).all()
        assert (flat.min(axis=1) >= below - 1e-4).all()


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason="no shared models on this machine")
@pytest.mark.parametrize("name", CONVOLUTIONAL)
@pytest.mark.parametrize("scaled", [False, True])
def test_convolutional_nets_compute_the_same(name: str, scaled: bool) -> None:
    recipe = load_recipe("xint8", {"prepare": {"scale_clip_bounds": scaled}})
    before = prepare(str(SHARED / f"{name}.onnx"), recipe).model
    after = before.clone()
    report = equalize(after, Equalize(), power_of_two=scaled)
    assert report.spaces > 0
    value = before.graph.inputs[0]
    shape = tuple(d if isinstance(d, int) else 1 for d in value.shape or ())
    generator = np.random.default_rng(0)
    samples = [
        {str(value.name): generator.normal(0, scale, shape).astype(np.float32)} for scale in (0.1, 1, 100)
    ]
    assert check_equalized(before, after, samples) < 1e-4
