"""Bfloat16 and float16 models: every form runs in a stock session, and they all give the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, numpy_helper

import roundel
from helpers import Feed, build, feeds, node, normal, rng
from roundel.model.graph import constant_array
from roundel.numerics.floats import round_bfloat16
from roundel.qdq import attach

SHAPES = {"x": [1, 3, 8, 8]}
LEVELS = (
    ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
)


def network() -> onnx.ModelProto:
    """Layers, a residual, a reshape, a product of two tensors, and two outputs of which one is read on."""
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["r"], name="relu"),
        node("Conv", ["r", "k"], ["d"], name="conv2"),
        node("Add", ["d", "r"], ["s"], name="add"),
        node("Sigmoid", ["s"], ["g"], name="gate"),
        node("Mul", ["s", "g"], ["m"], name="swish"),
        node("Flatten", ["m"], ["f"], name="flat"),
        node("Gemm", ["f", "v", "u"], ["logits"], name="classifier"),
        node("Softmax", ["logits"], ["y"], name="softmax"),
    ]
    constants = {
        "w": normal(4, 3, 3, 3),
        "b": normal(4, seed=1),
        "k": normal(4, 4, 1, 1, seed=2),
        "v": normal(256, 5, seed=3),
        "u": normal(5, seed=4),
    }
    return build(nodes, SHAPES, ["y", "logits"], constants)


def outputs(model: onnx.ModelProto, feed: Feed, level: Any = None) -> list[np.ndarray[Any, Any]]:
    """As a user runs it: no option but, where asked for, the optimization level."""
    options = ort.SessionOptions()
    if level is not None:
        options.graph_optimization_level = level
    session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    return [np.asarray(value) for value in session.run(None, feed)]


def bits(values: list[np.ndarray[Any, Any]]) -> list[bytes]:
    return [value.tobytes() for value in values]


def made(recipe: str = "bf16", data: Any = None, **changes: Any) -> onnx.ModelProto:
    return roundel.quantize(network(), recipe=recipe, data=data, changes=changes).model


@pytest.mark.parametrize("recipe", ["bf16", "fp16"])
def test_all_forms_give_the_same_bits(recipe: str) -> None:
    forms = [
        made(recipe, floats={"form": form}, output={"half_weights": half})
        for form in ("pair", "cast")
        for half in (False, True)
    ]
    for feed in feeds(SHAPES, 3):
        for level in (*LEVELS, None):
            first, *others = (bits(outputs(model, feed, level)) for model in forms)
            assert all(other == first for other in others)


def test_the_casts_survive_every_optimization() -> None:
    feed, model = feeds(SHAPES, 1)[0], network()
    exact = outputs(model, feed)[1]
    for level in LEVELS:
        short = outputs(made("bf16_cast"), feed, level)[1]
        assert not np.array_equal(short, exact)
        assert (round_bfloat16(short) == short).all()  # a graph output is rounded, too


def test_the_numbers_are_those_of_rounding_by_hand() -> None:
    weight = normal(6, 4)
    model = build([node("MatMul", ["x", "w"], ["y"])], {"x": [3, 6]}, ["y"], {"w": weight})
    feed = {"x": normal(3, 6, seed=9)}
    got = outputs(roundel.quantize(model, recipe="bf16").model, feed)[0]
    expected = round_bfloat16(round_bfloat16(feed["x"]) @ round_bfloat16(weight))
    assert np.allclose(got, expected, rtol=2**-8, atol=1e-6)
    assert (got == expected).mean() > 0.8  # sums may be taken in another order


def test_no_data_are_needed_and_every_tensor_is_marked() -> None:
    result = roundel.quantize(network(), recipe="bf16")
    assert result.record.quantized
    assert result.record.data == {"kind": "none needed"}
    assert {str(t.scheme) for t in result.plan.tensors.values()} == {"bfloat16"}
    assert {str(t.source) for t in result.plan.tensors.values()} == {"no scale"}
    roles = result.record.counts["tensors"]
    assert (roles["weight"], roles["bias"]) == (3, 2)


def test_half_weights_hold_sixteen_bits() -> None:
    whole, half = made("bf16_cast"), made("bf16_cast", output={"half_weights": True})
    kinds = {i.name: i.data_type for i in half.graph.initializer if i.dims}
    assert set(kinds.values()) == {TensorProto.BFLOAT16}
    weights = sum(4 * int(np.prod(i.dims)) for i in whole.graph.initializer)
    assert len(whole.SerializeToString()) - len(half.SerializeToString()) > 0.4 * weights
    stored = next(i for i in half.graph.initializer if i.name == "w_quantized")
    exact = round_bfloat16(normal(4, 3, 3, 3))
    assert np.array_equal(numpy_helper.to_array(stored).astype(np.float32), exact)


def test_a_plain_graph_shows_bfloat16_at_its_input_only() -> None:
    model = made("vaiml_bf16")
    casts = [n for n in model.graph.node if n.op_type == "Cast"]
    assert [n.input[0] for n in casts] == ["x", "x_QuantizeLinear_Output"]
    assert not model.functions
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.dtype == np.float32:
            assert (round_bfloat16(array) == array).all()
    assert [o.name for o in model.graph.output] == ["y", "logits"]
    small = made("vaiml_bf16", output={"half_weights": True})
    feed = feeds(SHAPES, 1)[0]
    assert bits(outputs(model, feed)) == bits(outputs(small, feed))


def test_scales_bring_ranges_to_two() -> None:
    data = feeds(SHAPES, 3)
    result = roundel.quantize(
        network(),
        recipe="bf16",
        data=data,
        changes={"activations": {"scaled": True}, "weights": {"scaled": True}},
    )
    scales = {str(k): constant_array(v) for k, v in result.ir.graph.initializers.items() if "_scale" in k}
    assert scales["w_scale"] == np.float32(np.abs(normal(4, 3, 3, 3)).max() / 2)
    assert scales["x_scale"] == np.float32(max(np.abs(feed["x"]).max() for feed in data) / 2)
    assert scales["y_scale"] == np.float32(0.5)  # Softmax ends at 1


def test_scaled_forms_agree_too() -> None:
    data = feeds(SHAPES, 3)
    both: dict[str, Any] = {"activations": {"scaled": True}, "weights": {"scaled": True}}
    forms = [
        made("bf16", data, floats={"form": form}, output={"half_weights": half}, **both)
        for form in ("pair", "cast")
        for half in (False, True)
    ]
    first, *others = (bits(outputs(model, data[0])) for model in forms)
    assert all(other == first for other in others)


@pytest.mark.parametrize("form", ["pair", "cast"])
def test_clipping_keeps_what_is_finite_finite(form: str) -> None:
    model = build([node("Mul", ["x", "k"], ["y"])], {"x": [1, 4]}, ["y"], {"k": np.float32([1.0])})
    feed = {"x": np.float32([[3.4e38, -3.4e38, 1.0, np.inf]])}
    floats = {"form": form}
    loose = roundel.quantize(model, recipe="bf16", changes={"floats": floats}).model
    held = roundel.quantize(model, recipe="bf16", changes={"floats": {**floats, "clip": True}}).model
    assert np.isinf(outputs(loose, feed)[0]).sum() == 3
    assert np.isfinite(outputs(held, feed)[0]).all()


def test_weights_beyond_the_range_end_at_the_largest_value() -> None:
    weight = np.float32([[3.4e38, -3.4e38], [1.0, 1e-40]])
    model = build([node("MatMul", ["x", "w"], ["y"])], {"x": [1, 2]}, ["y"], {"w": weight})
    for half in (False, True):
        changes = {"output": {"half_weights": half}}
        result = roundel.quantize(model, recipe="bf16", changes=changes)
        got = outputs(result.model, {"x": np.float32([[1, 0]])})[0]
        assert np.array_equal(got, np.float32([[3.3895314e38, -3.3895314e38]]))
        assert any("exceeds bfloat16" in note for note in result.record.notes)


def test_nan_and_infinity_pass_through() -> None:
    model = build([node("Mul", ["x", "k"], ["y"])], {"x": [1, 5]}, ["y"], {"k": np.float32([1.0])})
    feed = {"x": np.float32([[np.nan, np.inf, -np.inf, 1e-40, -0.0]])}
    for form in ("pair", "cast"):
        short = roundel.quantize(model, recipe="bf16", changes={"floats": {"form": form}}).model
        got = outputs(short, feed)[0]
        assert np.array_equal(got, round_bfloat16(feed["x"]), equal_nan=True)


def test_the_bare_form_has_no_functions(tmp_path: Path) -> None:
    changes = {"output": {"strip_functions": True}}
    bare = roundel.quantize(network(), tmp_path / "bare.onnx", recipe="bf16", changes=changes)
    model = onnx.load(tmp_path / "bare.onnx")
    assert not model.functions
    assert any(n.op_type == "ExtendedQuantizeLinear" for n in model.graph.node)
    with pytest.raises(Exception, match="ExtendedQuantizeLinear"):
        ort.InferenceSession(str(tmp_path / "bare.onnx"), providers=["CPUExecutionProvider"])
    feed = feeds(SHAPES, 1)[0]
    assert bits(outputs(ir.to_proto(attach(bare.ir)), feed)) == bits(outputs(made(), feed))


def test_single_tensors_take_other_types() -> None:
    model, data = network(), feeds(SHAPES, 3)
    overrides = [
        {"tensors": ["x", "w"], "type": "int8"},
        {"tensors": ["logits"], "type": "float16"},
        {"tensors": ["k"], "type": "float"},
    ]
    result = roundel.quantize(model, recipe="bf16", data=data, changes={"overrides": overrides})
    kinds = {name: str(t.scheme) for name, t in result.plan.tensors.items()}
    assert kinds["x"] == kinds["w"] == "int8, symmetric"
    assert kinds["logits"] == "float16"
    assert "k" not in kinds
    assert kinds["r"] == "bfloat16"
    assert result.record.outputs[0].sqnr_db > 20


def test_a_short_float_among_integers() -> None:
    data = feeds(SHAPES, 3)
    overrides = [{"tensors": ["s"], "type": "bfloat16"}, {"tensors": ["w"], "type": "bfloat16"}]
    result = roundel.quantize(network(), recipe="a8w8_minmax", data=data, changes={"overrides": overrides})
    assert str(result.plan.tensors["s"].scheme) == "bfloat16"
    assert "b" not in result.plan.tensors  # its scale would be that of integers
    assert result.record.outputs[0].sqnr_db > 15


def test_improving_integers_leaves_short_floats_alone() -> None:
    data = feeds(SHAPES, 12)
    changes = {"overrides": [{"tensors": ["w", "r"], "type": "bfloat16"}]}
    result = roundel.quantize(network(), recipe="a8w8", data=data, changes=changes)
    improved = {layer.layer for step in result.record.improvements for layer in step.layers}
    assert "classifier" in improved
    assert not improved & {"conv", "conv2"}


def test_random_values_round_as_onnx_runtime_casts() -> None:
    values = rng(3).integers(0, 2**32, (1, 4096), dtype=np.uint64).astype(np.uint32).view(np.float32)
    model = build([node("Transpose", ["x"], ["y"])], {"x": [1, 4096]}, ["y"])
    cast = build(
        [
            node("Cast", ["x"], ["h"], to=TensorProto.BFLOAT16),
            node("Cast", ["h"], ["f"], to=TensorProto.FLOAT),
            node("Transpose", ["f"], ["y"]),
        ],
        {"x": [1, 4096]},
        ["y"],
    )
    pair = roundel.quantize(model, recipe="bf16").model
    a, b = outputs(pair, {"x": values})[0], outputs(cast, {"x": values})[0]
    assert np.array_equal(a, b, equal_nan=True)
