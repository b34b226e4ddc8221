"""Tensors that were zero for all of the calibration data: the biases behind them must survive."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from helpers import activations, build, feeds, node, normal, quantize, sqnr, weights

IMAGE = {"x": [1, 3, 8, 8]}


def _dead(bias: float, weight: float) -> onnx.ModelProto:
    """A layer that reads a Relu whose results are all zero."""
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Add", ["c", "low"], ["d"]),
        node("Relu", ["d"], ["r"]),
        node("Conv", ["r", "w2", "b"], ["y"]),
    ]
    constants = {
        "w": normal(4, 3, 1, 1),
        "low": np.full((1, 1, 1, 1), -1000, np.float32),
        "w2": normal(4, 4, 1, 1, seed=3, scale=weight),
        "b": normal(4, seed=5, scale=bias),
    }
    return build(nodes, IMAGE, ["y"], constants)


@pytest.mark.parametrize(("bias", "weight"), [(0.05, 2.0), (1e-3, 1.0), (1e-5, 3.0), (30.0, 0.01)])
@pytest.mark.parametrize(
    ("preset", "least"),
    [("a8w8", 38), ("a16w8", 80), ("xint8", 38), ("u8s8_aaws", 38), ("s16s8_asws", 80)],
)
def test_the_bias_behind_survives(preset: str, least: float, bias: float, weight: float) -> None:
    model, data = _dead(bias, weight), feeds(IMAGE)
    assert sqnr(model, quantize(model, preset, data), data) > least


def test_the_range_holds_what_counts_as_much_as_the_bias() -> None:
    model = _dead(0.05, 2.0)
    result = quantize(model, "a8w8", feeds(IMAGE))
    top = 127 * float(activations(result.model)["r"].scale)
    bias, weight = (np.abs(weights(result.model)[name].real).max() for name in ("b", "w2"))
    assert 1 < top * weight / bias < 10


def test_of_several_readers_the_finest_bias_decides() -> None:
    model = _dead(0.05, 2.0)
    model.graph.node.append(node("Conv", ["r", "w2", "fine"], ["z"]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(normal(4, seed=7, scale=1e-3), "fine"))
    model.graph.output.append(onnx.helper.make_tensor_value_info("z", 1, [1, 4, 8, 8]))
    data = feeds(IMAGE)
    assert sqnr(model, quantize(model, "a8w8", data), data) > 38


def test_scales_of_xint8_stay_powers_of_two() -> None:
    scale = float(activations(quantize(_dead(0.05, 2.0), "xint8", feeds(IMAGE)).model)["r"].scale)
    assert np.log2(scale) == round(np.log2(scale))


def test_a_16_bit_bias_fits() -> None:
    result = quantize(_dead(0.05, 2.0), "a16w8", feeds(IMAGE), bias={"type": "int16"})
    assert weights(result.model)["b"].dtype == "int16"


def test_without_a_bias_the_scale_is_1() -> None:
    model = _dead(0.0, 2.0)
    assert float(activations(quantize(model, "a8w8", feeds(IMAGE)).model)["r"].scale) == 1
