"""What the reader makes of a file: the same answers whoever wrote it, and the numbers of ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import roundel
from helpers import build, feeds, initializers, node, normal, quantize, run
from roundel.qdq.nodes import bare_name
from roundel.qdq.read import StoredTensors, read_quantizer, stored_values, strip_stored
from roundel.quark.tools.operators import convert_qdq_to_customqdq, remove_qdq
from roundel.quark.tools.tool import read_model

SHAPE = [1, 3, 8, 8]


def network() -> onnx.ModelProto:
    nodes = [node("Conv", ["x", "w"], ["c"], name="conv"), node("Relu", ["c"], ["y"], name="relu")]
    return build(nodes, {"x": SHAPE}, ["y"], {"w": normal(4, 3, 3, 3)})


def made(recipe: str) -> onnx.ModelProto:
    return quantize(network(), recipe, feeds({"x": SHAPE}, count=4)).model


def held(model: ir.Model) -> StoredTensors:
    found = strip_stored(model)
    left = {n.op_type for n in model.graph}
    assert left <= {"Conv", "Relu", "Identity"}, left
    return found


def test_native_microsoft_and_amds_operators_say_the_same() -> None:
    microsoft = read_model(made("a16w8"))
    custom = convert_qdq_to_customqdq(microsoft)[0]
    native = microsoft.clone()
    for pair in native.graph:
        pair.domain = ""
    native.graph.opset_imports[""] = 21
    first, *others = (held(model).tensors for model in (microsoft, custom, native))
    kinds = {bare_name(name): tensor.dtype for name, tensor in first.items()}
    assert kinds == {"x": "int16", "w": "int8", "y": "int16"}
    for other in others:
        assert other.keys() == first.keys()
        for name, tensor in other.items():
            assert np.array_equal(tensor.scale, first[name].scale)
            assert (tensor.dtype, tensor.constant) == (first[name].dtype, first[name].constant)


@pytest.mark.parametrize(("recipe", "kind"), [("bf16", "bfloat16"), ("bfp16", "bfp"), ("mxint8", "mx")])
def test_short_floats_and_blocks(recipe: str, kind: str) -> None:
    found = held(read_model(made(recipe))).tensors
    assert {found["x"].dtype, found["w"].dtype} == {kind}
    assert found["x"].params is None


def blocked(**options: Any) -> onnx.ModelProto:
    model = build(
        [node("MatMul", ["x", "w"], ["y"], name="product")], {"x": [2, 80]}, ["y"], {"w": normal(80, 6)}
    )
    changes = {"weight_only": {"format": "qdq", "accuracy_level": 0, "group_size": 32, **options}}
    return roundel.quantize(model, recipe="matmul_nbits", changes=changes).model


@pytest.mark.parametrize("symmetric", [True, False])
def test_weights_in_blocks_are_what_onnx_runtime_makes_of_them(symmetric: bool) -> None:
    model = blocked(bits=8, symmetric=symmetric)
    (dequantizer,) = [n for n in ir.from_proto(model).graph if n.op_type == "DequantizeLinear"]
    values = stored_values(dequantizer)
    assert values is not None
    feed = {"x": normal(2, 80, seed=5)}
    np.testing.assert_allclose(feed["x"] @ values, run(model, feed)[0], rtol=1e-5, atol=1e-5)
    bare = ir.to_proto(remove_qdq(read_model(model))[0])
    assert [n.op_type for n in bare.graph.node] == ["MatMul"]
    assert np.array_equal(next(iter(initializers(bare).values())), values)


def test_a_zero_point_that_is_left_out_has_the_type_of_the_codes() -> None:
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.INT8))
    scale = ir.Value(name="s", const_value=ir.tensor(np.float32([0.5, 0.25]), name="s"))
    said = read_quantizer(ir.Node("", "DequantizeLinear", [x, scale]))
    assert said is not None
    assert said.zero_point.dtype == np.int8
    assert said.zero_point.shape == (2,)
    codes = np.int8([[4], [4]]).T
    assert said.real(codes).tolist() == [[2.0, 1.0]]


def test_names_lose_what_quantizers_append() -> None:
    assert bare_name("a_QuantizeLinear_Input") == bare_name("a_DequantizeLinear_Output") == "a"
    assert bare_name("_dequantized") == "_dequantized"
