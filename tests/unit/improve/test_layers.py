"""Layers as matrices: what they are computed from, whatever code means zero."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from roundel.improve.layers import Layer

CONV = Layer(
    "n", "Conv", "x", "w", None, "y", 2, (3, 2), (2, 1), (1, 2), (1, 1), (0, 2)
)  # groups, kernel, strides, dilations, begin, end
TURNED = Layer("n", "ConvTranspose", "x", "w", None, "y", 2, (3, 2), (2, 1), (1, 1), (1, 0), (1, 1))


def given(layer: Layer, data: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The layer's output in ONNX Runtime."""
    node = helper.make_node(
        layer.op,
        ["x", "w"],
        ["y"],
        group=layer.groups,
        kernel_shape=layer.kernel,
        strides=layer.strides,
        dilations=layer.dilations,
        pads=[*layer.begin, *layer.end],
    )
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("x", "w", "y")]
    graph = helper.make_graph([node], "g", values[:2], values[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return ort.InferenceSession(model.SerializeToString()).run(None, {"x": data, "w": weight})[0]


@pytest.mark.parametrize(("layer", "shape"), [(CONV, (6, 2, 3, 2)), (TURNED, (4, 3, 3, 2))])
def test_rows_times_the_matrix_are_the_output_whatever_means_zero(
    layer: Layer, shape: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (2, 4, 7, 6)).astype(np.uint8)
    weight = rng.integers(-5, 6, shape).astype(np.float32)
    wanted = given(layer, codes.astype(np.float32) - 128, weight)
    places = layer.places(wanted.shape, 10**6, rng)
    rows = layer.inputs(codes, places, wanted.shape[2:], 128)
    assert rows.dtype == np.uint8
    got = np.einsum("ngk,gok->ngo", rows.astype(np.float32) - 128, layer.matrix(weight))
    np.testing.assert_array_equal(got, layer.targets(wanted, places))
