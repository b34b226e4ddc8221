"""Layers as matrices: what they are computed from, whatever code means zero."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from helpers import build, node, normal
from roundel.model.layers import Layer, read_own

CONV: dict[str, Any] = {"strides": [2, 1], "dilations": [1, 2], "pads": [1, 1, 0, 2]}
TURNED: dict[str, Any] = {"strides": [2, 1], "pads": [1, 0, 1, 1]}


def convolution(op: str, weight: np.ndarray, attributes: dict[str, Any]) -> tuple[onnx.ModelProto, Layer]:
    """A model of one layer, and the layer."""
    nodes = [node(op, ["x", "w"], ["y"], group=2, kernel_shape=[3, 2], **attributes)]
    proto = build(nodes, {"x": (2, 4, 7, 6)}, ["y"], {"w": weight})
    layer = read_own(next(iter(ir.from_proto(proto).graph)))
    assert layer is not None
    return proto, layer


@pytest.mark.parametrize(
    ("op", "attributes", "shape"),
    [("Conv", CONV, (6, 2, 3, 2)), ("ConvTranspose", TURNED, (4, 3, 3, 2))],
)
def test_rows_times_the_matrix_are_the_output_whatever_means_zero(
    op: str, attributes: dict[str, Any], shape: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (2, 4, 7, 6)).astype(np.uint8)
    weight = rng.integers(-5, 6, shape).astype(np.float32)
    proto, layer = convolution(op, weight, attributes)
    session = ort.InferenceSession(proto.SerializeToString())
    wanted = session.run(None, {"x": codes.astype(np.float32) - 128})[0]
    places = layer.places(wanted.shape, 10**6, rng)
    rows = layer.inputs(codes, places, wanted.shape[2:], 128)
    assert rows.dtype == np.uint8
    got = np.einsum("ngk,gok->ngo", rows.astype(np.float32) - 128, layer.matrix(weight))
    np.testing.assert_array_equal(got, layer.targets(wanted, places))


LAYERS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "Conv": ({"group": 2}, (6, 2, 3, 2)),
    "ConvTranspose": ({"group": 2}, (4, 3, 3, 2)),
    "Gemm": ({"transB": 1}, (3, 4)),
    "MatMul": ({}, (4, 3)),
    "InstanceNormalization": ({}, (4,)),
    "LayerNormalization": ({"axis": 1}, (4, 7, 6)),
}


@pytest.mark.parametrize("op", LAYERS)
def test_both_forms_of_a_weight_have_an_inverse(op: str) -> None:
    attributes, shape = LAYERS[op]
    data = (2, 4) if op in ("Gemm", "MatMul") else (2, 4, 7, 6)
    weights = {"w": normal(*shape), "b": normal(4 if op.startswith("Inst") else 3)}
    bias = ["b"] if op in ("Gemm", "InstanceNormalization") else []
    proto = build([node(op, ["x", "w", *bias], ["y"], **attributes)], {"x": data}, ["y"], weights)
    layer = read_own(next(iter(ir.from_proto(proto).graph)))
    assert layer is not None
    matrix, blocks = layer.matrix(weights["w"]), layer.blocks(weights["w"])
    assert matrix.shape == (*blocks.shape[:2], blocks.shape[2] * blocks.shape[3])
    np.testing.assert_array_equal(layer.tensor(matrix, shape), weights["w"])
    np.testing.assert_array_equal(layer.unblocked(blocks, shape), weights["w"])


OTHERS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "two readers of the weight": ("MatMul", {}, ["s", "w"]),
    "a product that is scaled": ("Gemm", {"alpha": 2.0}, ["x", "v"]),
    "an input that is transposed": ("Gemm", {"transA": 1}, ["x", "v"]),
    "a bias of its own for each row": ("Gemm", {}, ["x", "v", "rows"]),
    "a computed weight": ("MatMul", {}, ["x", "s"]),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_rounding_cannot_take(case: str) -> None:
    op, attributes, inputs = OTHERS[case]
    first = node("MatMul", ["x", "w"], ["s"])
    constants = {"w": normal(4, 4), "v": normal(4, 4), "rows": normal(4, 1)}
    kept = {name: array for name, array in constants.items() if name == "w" or name in inputs}
    proto = build([first, node(op, inputs, ["y"], **attributes)], {"x": (4, 4)}, ["y"], kept)
    assert read_own(list(ir.from_proto(proto).graph)[1]) is None
