"""Tools for quantized models: what they promise, before and after, in ONNX Runtime."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from helpers import Stored, activations, build, feeds, initializers, node, normal, ops, quantize, run, weights
from roundel.quark.tools.operators import (
    convert_custom_ops,
    convert_customqdq_to_qdq,
    convert_qdq_to_customqdq,
    convert_qdq_to_qop,
    remove_qdq,
    remove_qdq_between_ops,
    remove_qdq_mul_add,
)
from roundel.quark.tools.retyping import (
    convert_a8w8_npu_to_a8w8_cpu,
    convert_bias_int32_to_int16,
    convert_resize_fs_to_pof2s,
    convert_s8s8_to_u8s8,
    convert_u16s8_to_s16s8,
    convert_u16u8_to_u8u8,
)
from roundel.quark.tools.tool import read_model
from roundel.quark.tools.views import a16w8_a8w8_nodes


def after(tool, model: onnx.ModelProto, *more) -> onnx.ModelProto:
    """The tool's result, which must be a valid model; the model itself must not have changed."""
    before, source = model.SerializeToString(), read_model(model)
    known = ir.to_proto(source).SerializeToString()
    result = ir.to_proto(tool(source, *more)[0])
    onnx.checker.check_model(result)
    assert ir.to_proto(source).SerializeToString() == known, "the tool changed its input"
    assert model.SerializeToString() == before
    assert [o.name for o in result.graph.output] == [o.name for o in model.graph.output]
    return result


def types(model: onnx.ModelProto) -> dict[str, str]:
    return {name: stored.dtype for name, stored in activations(model).items()}


def test_removing_pairs_leaves_the_values_that_codes_stand_for(model_of, float_model, sample) -> None:
    quantized = model_of("a8w8")
    result = after(remove_qdq, quantized)
    assert ops(result) == ops(float_model)
    assert not {n.op_type for n in result.graph.node} & {"QuantizeLinear", "DequantizeLinear"}
    stored, found = weights(quantized), initializers(result)
    assert np.allclose(found["w"], stored["w"].real, atol=1e-7)
    expected, got = run(float_model, sample)[0], run(result, sample)[0]
    assert not np.array_equal(expected, got)
    assert np.allclose(expected, got, atol=0.1)


def test_removing_pairs_between_two_operators(model_of, sample) -> None:
    quantized = model_of("a8w8")
    result = after(remove_qdq_between_ops, quantized, [("Mul", "Add")])
    assert set(activations(quantized)) - set(activations(result)) == {"m"}
    add = next(n for n in result.graph.node if n.name == "add")
    assert add.input[0] == "m"
    assert np.allclose(run(result, sample)[0], run(quantized, sample)[0], atol=0.2)
    assert after(remove_qdq_mul_add, quantized) == result


def test_nothing_between_operators_that_do_not_meet(model_of) -> None:
    quantized = model_of("a8w8")
    assert len(after(remove_qdq_between_ops, quantized, [("Gemm", "Conv")]).graph.node) == len(
        quantized.graph.node
    )


@pytest.mark.parametrize("recipe", ["s8s8_aaws", "a8w8"])
def test_int8_activations_as_uint8_are_exact(recipe, model_of, sample) -> None:
    quantized = model_of(recipe)
    result = after(convert_s8s8_to_u8s8, quantized)
    assert set(types(quantized).values()) == {"int8"}
    assert set(types(result).values()) == {"uint8"}
    assert {w.dtype for w in weights(result).values()} == {"int8", "int32"}
    assert np.array_equal(run(result, sample)[0], run(quantized, sample)[0])


def test_uint16_activations_as_int16_are_exact(model_of, sample) -> None:
    quantized = model_of("u16s8_aaws")
    result = after(convert_u16s8_to_s16s8, quantized)
    assert set(types(result).values()) == {"int16"}
    assert np.array_equal(run(result, sample)[0], run(quantized, sample)[0])


def test_uint16_activations_as_uint8_keep_their_range_and_their_biases(model_of, sample) -> None:
    quantized = model_of("u16s8_aaws")
    result = after(convert_u16u8_to_u8u8, quantized)
    assert set(types(result).values()) == {"uint8"}
    before, now = activations(quantized)["x"], activations(result)["x"]
    assert np.isclose(float(now.scale) * 255, float(before.scale) * 65535, rtol=1e-6)
    bias, step = weights(result)["b"], float(now.scale) * float(weights(result)["w"].scale)
    assert np.isclose(float(bias.scale), step, rtol=1e-6)
    assert np.allclose(bias.real, weights(quantized)["b"].real, atol=step)
    assert np.allclose(run(result, sample)[0], run(quantized, sample)[0], atol=0.1)


def _network() -> onnx.ModelProto:
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["y"], name="relu"),
    ]
    return build(nodes, {"x": [1, 3, 8, 8]}, ["y"], {"w": normal(4, 3, 3, 3), "b": normal(4, seed=2)})


def test_eight_bit_biases_as_32_bit_ones(model_of, sample) -> None:
    quantized = model_of("xint8")
    result = after(convert_a8w8_npu_to_a8w8_cpu, quantized)
    assert weights(quantized)["b"].dtype == "int8"
    bias = weights(result)["b"]
    assert bias.dtype == "int32"
    step = float(activations(result)["x"].scale) * float(weights(result)["w"].scale)
    assert np.isclose(float(bias.scale), step)
    assert np.allclose(bias.real, weights(quantized)["b"].real, atol=step)
    assert np.allclose(run(result, sample)[0], run(quantized, sample)[0], atol=1e-3)


def test_32_bit_biases_as_16_bit_ones_where_they_fit(model_of, sample) -> None:
    quantized = model_of("a8w8")
    result = after(convert_bias_int32_to_int16, quantized)
    fits = {
        name: bool(np.abs(stored.codes).max() <= 32767)
        for name, stored in weights(quantized).items()
        if stored.dtype == "int32"
    }
    assert fits
    for name, small in fits.items():
        assert weights(result)[name].dtype == ("int16" if small else "int32")
    assert np.array_equal(run(result, sample)[0], run(quantized, sample)[0])


def test_biases_that_do_not_fit_stay_in_32_bits(sample) -> None:
    model = _network()
    bias = next(t for t in model.graph.initializer if t.name == "b")
    bias.CopyFrom(onnx.numpy_helper.from_array(np.float32([900, 1, 1, 1]), "b"))
    quantized = quantize(model, "a16w8", feeds({"x": [1, 3, 8, 8]}, count=4)).model
    result = after(convert_bias_int32_to_int16, quantized)
    assert weights(result)["b"].dtype == "int32"


def test_amds_operators_and_back(model_of, sample) -> None:
    quantized = model_of("a16w8")
    custom = after(convert_qdq_to_customqdq, quantized)
    kinds = Counter(n.op_type for n in custom.graph.node if n.domain == "com.amd.quark")
    assert set(kinds) == {"ExtendedQuantizeLinear", "ExtendedDequantizeLinear"}
    back = after(convert_customqdq_to_qdq, custom)
    assert {n.domain for n in back.graph.node if "QuantizeLinear" in n.op_type} == {"com.microsoft"}
    assert np.array_equal(run(back, sample)[0], run(quantized, sample)[0])
    old = after_unchecked(convert_custom_ops, custom)
    assert {n.op_type for n in old.graph.node if n.domain == "com.vai.quantize"} == {
        "VitisQuantizeLinear",
        "VitisDequantizeLinear",
    }
    assert "com.amd.quark" not in {o.domain for o in old.opset_import}
    new = after_unchecked(convert_custom_ops, old, True)
    assert Counter(n.op_type for n in new.graph.node) == Counter(n.op_type for n in custom.graph.node)


def after_unchecked(tool, model: onnx.ModelProto, *more) -> onnx.ModelProto:
    return ir.to_proto(tool(read_model(model), *more)[0])


def test_qlinear_operators_compute_the_same_codes(model_of, sample) -> None:
    quantized = model_of("u8s8_aaws")
    result = after(convert_qdq_to_qop, quantized)
    made = {n.op_type for n in result.graph.node}
    assert {"QLinearConv", "QLinearSigmoid", "QLinearMul", "QLinearAdd", "QGemm"} <= made
    assert not made & {"Conv", "Gemm", "Mul"}
    step = float(activations(quantized)["y"].scale)
    session = ort.InferenceSession(result.SerializeToString(), providers=["CPUExecutionProvider"])
    got = session.run(None, sample)[0]
    assert np.abs(got - run(quantized, sample)[0]).max() <= 2.01 * step


def test_sixteen_bit_models_keep_their_pairs(model_of) -> None:
    quantized = model_of("a16w8")
    assert ops(after(convert_qdq_to_qop, quantized)) == ops(quantized)


def test_scales_around_resize_become_powers_of_two() -> None:
    nodes = [
        node("Conv", ["x", "w"], ["c"], name="conv"),
        node("Resize", ["c", "", "scales"], ["z"], name="resize", mode="nearest"),
        node("Conv", ["z", "k"], ["y"], name="last"),
    ]
    constants = {
        "w": normal(4, 3, 3, 3),
        "scales": np.float32([1, 1, 2, 2]),
        "k": normal(2, 4, 1, 1, seed=3),
    }
    model = build(nodes, {"x": [1, 3, 8, 8]}, ["y"], constants)
    data = feeds({"x": [1, 3, 8, 8]})
    quantized = quantize(model, "a8w8", data).model
    result = after(convert_resize_fs_to_pof2s, quantized)
    for name, stored in activations(result).items():
        before = float(activations(quantized)[name].scale)
        if name in ("c", "z"):
            exponent = np.log2(float(stored.scale))
            assert exponent == round(exponent)
            assert before <= float(stored.scale) < 2 * before
        else:
            assert float(stored.scale) == before
    assert np.allclose(run(result, data[0])[0], run(quantized, data[0])[0], atol=0.5)


def test_layers_by_the_width_of_their_activations(model_of) -> None:
    assert a16w8_a8w8_nodes(read_model(model_of("a8w8"))) == (["conv", "gemm"], [])
    assert a16w8_a8w8_nodes(read_model(model_of("a16w8"))) == ([], ["conv", "gemm"])


def test_the_view_of_the_tests_is_right(model_of) -> None:
    assert isinstance(activations(model_of("a8w8"))["x"], Stored)
