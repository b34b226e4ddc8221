"""Dynamic quantization: integers computed at run time, no calibration data."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import roundel
from helpers import assert_sound, build, feeds, initializers, node, normal, ops, run
from roundel.numerics.metrics import Closeness

W, B = normal(16, 8, seed=1, scale=0.3), normal(8, seed=2)
ROWS = {"x": [4, 16]}


def _dynamic(model: onnx.ModelProto, **changes: Any) -> onnx.ModelProto:
    result = roundel.quantize(model, recipe="uint8_dynamic_quant", changes=changes).model
    assert_sound(model, result)
    return result


def _close(model: onnx.ModelProto, result: onnx.ModelProto) -> float:
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    pairs = [(run(model, feed)[0], run(result, feed)[0]) for feed in feeds(shapes)]
    return min(Closeness.of(a, b).sqnr_db for a, b in pairs)


MODELS = {
    "matmul": (node("MatMul", ["x", "w"], ["y"]), {"w": W}),
    "gemm": (node("Gemm", ["x", "w", "b"], ["y"]), {"w": W, "b": B}),
    "gemm-trans-b": (node("Gemm", ["x", "w", "b"], ["y"], transB=1), {"w": W.T.copy(), "b": B}),
    "gemm-no-bias": (node("Gemm", ["x", "w"], ["y"]), {"w": W}),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["uint8", "int8"])
def test_products_compute_in_integers(name: str, kind: str) -> None:
    op, constants = MODELS[name]
    model = build([op], ROWS, ["y"], constants)
    result = _dynamic(model, weights={"type": kind, "symmetric": kind == "int8"})
    assert "MatMulInteger" in ops(result)
    assert "DynamicQuantizeLinear" in ops(result)
    assert initializers(result)["w_quantized"].dtype == kind
    assert _close(model, result) > 30


@pytest.mark.parametrize(
    "op",
    [
        node("Gemm", ["x", "w", "b"], ["y"], alpha=0.5),
        node("Gemm", ["x", "w", "b"], ["y"], beta=2.0),
        node("Tanh", ["x"], ["y"]),
    ],
)
def test_what_has_no_integer_form_stays(op: onnx.NodeProto) -> None:
    constants = {"w": W, "b": B} if op.op_type == "Gemm" else {}
    model = build([op], ROWS, ["y"], constants)
    assert ops(_dynamic(model)) == [op.op_type]


def test_convolutions_too() -> None:
    nodes = [node("Conv", ["x", "w", "b"], ["y"], name="conv")]
    constants = {"w": normal(4, 3, 3, 3, seed=1), "b": normal(4, seed=2)}
    model = build(nodes, {"x": [1, 3, 8, 8]}, ["y"], constants)
    result = _dynamic(model, selection={"op_types": ["Conv"]})
    assert "ConvInteger" in ops(result)
    assert _close(model, result) > 30


def test_two_readers_share_one_quantizer() -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["a"]),
        node("MatMul", ["x", "v"], ["b"]),
        node("Add", ["a", "b"], ["y"]),
    ]
    model = build(nodes, ROWS, ["y"], {"w": W, "v": normal(16, 8, seed=5)})
    result = _dynamic(model)
    assert ops(result).count("DynamicQuantizeLinear") == 1
    assert _close(model, result) > 30


def test_excluded_nodes_stay() -> None:
    nodes = [node("MatMul", ["x", "w"], ["a"], name="one"), node("MatMul", ["a", "v"], ["y"], name="two")]
    model = build(nodes, ROWS, ["y"], {"w": W, "v": normal(8, 8, seed=5)})
    result = _dynamic(model, selection={"exclude": ["two"]})
    assert ops(result).count("MatMulInteger") == 1
    np.testing.assert_array_equal(initializers(result)["v"], normal(8, 8, seed=5))


def test_nothing_to_do_is_told() -> None:
    model = build([node("Tanh", ["x"], ["y"])], ROWS, ["y"])
    record = roundel.quantize(model, recipe="uint8_dynamic_quant").record
    assert not record.quantized
    assert record.float_nodes
