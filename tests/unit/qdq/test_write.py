"""Where Q/DQ nodes go in graphs that are awkward: outputs read inside, bodies, shared and taken names."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import roundel
from helpers import (
    activations,
    assert_sound,
    build,
    feeds,
    initializers,
    node,
    normal,
    ops,
    quantize,
    run,
    sqnr,
    weights,
)
from roundel.errors import RecipeError

W = normal(4, 3, 1, 1)
IMAGE = {"x": [1, 3, 4, 4]}


def _checked(model: onnx.ModelProto, recipe: str = "a8w8", floor: float = 28, **changes: Any) -> Any:
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    data = feeds(shapes)
    result = quantize(model, recipe, data, **changes)
    assert_sound(model, result.model)
    assert sqnr(model, result, data) > floor
    return result.model


def test_a_graph_output_keeps_its_name_and_its_readers() -> None:
    nodes = [node("Conv", ["x", "w"], ["c"]), node("Tanh", ["c"], ["y"])]
    result = _checked(build(nodes, IMAGE, ["c", "y"], {"w": W}))
    maker = {out: n for n in result.graph.node for out in n.output}
    assert maker["c"].op_type == "DequantizeLinear"
    [conv] = [n for n in result.graph.node if n.op_type == "Conv"]
    assert list(conv.output) == ["c_QuantizeLinear_Input"]
    [tanh] = [n for n in result.graph.node if n.op_type == "Tanh"]
    assert list(tanh.input) == ["c"], "the reader inside sees the quantized value, too"


@pytest.mark.parametrize("recipe", ["a8w8", "u8s8_aaws"])
def test_a_relu_at_the_output(recipe: str) -> None:
    nodes = [node("Conv", ["x", "w"], ["c"]), node("Relu", ["c"], ["r"]), node("Neg", ["r"], ["y"])]
    result = _checked(build(nodes, IMAGE, ["r", "y"], {"w": W}), recipe)
    assert set(activations(result)) == {"x", "r"}


def test_an_input_that_is_also_an_output() -> None:
    nodes = [node("Conv", ["x", "w"], ["y"])]
    model = build(nodes, IMAGE, ["x", "y"], {"w": W})
    result = quantize(model, data=feeds({"x": [1, 3, 4, 4]})).model
    assert_sound(model, result)
    feed = {"x": normal(1, 3, 4, 4)}
    np.testing.assert_array_equal(run(result, feed)[0], feed["x"])


@pytest.mark.parametrize("taken", ["initializer", "tensor", "body"])
def test_names_that_are_taken(taken: str) -> None:
    """A tensor called x_scale exists already; the new one must not collide with it."""
    constants: dict[str, Any] = {"w": W}
    nodes = [node("Conv", ["x", "w"], ["c"])]
    if taken == "initializer":
        constants["x_scale"] = np.float32([2.0])
        nodes.append(node("Max", ["c", "x_scale"], ["y"]))
    elif taken == "tensor":
        nodes += [node("Tanh", ["c"], ["x_scale"]), node("Neg", ["x_scale"], ["y"])]
    else:
        constants["flag"] = np.asarray(True)
        nodes.append(_if("flag", "c", inner="x_scale"))
    result = _checked(build(nodes, IMAGE, ["y"], constants), prepare={"fold_constants": False})
    assert "x_scale_1" in initializers(result)


def _if(flag: str, captured: str, inner: str = "inner") -> onnx.NodeProto:
    """If flag: tanh(captured) else -captured; the output is y."""
    shape = helper.make_tensor_value_info("branch_out", TensorProto.FLOAT, None)
    other = helper.make_tensor_value_info("other_out", TensorProto.FLOAT, None)
    for value in (shape, other):
        value.type.tensor_type.shape.SetInParent()
        for size in (1, 4, 4, 4):
            value.type.tensor_type.shape.dim.add().dim_value = size
    then = helper.make_graph(
        [node("Tanh", [captured], [inner]), node("Identity", [inner], ["branch_out"])], "then", [], [shape]
    )
    orelse = helper.make_graph([node("Neg", [captured], ["other_out"])], "else", [], [other])
    return node("If", [flag], ["y"], name="if", then_branch=then, else_branch=orelse)


def test_a_body_that_captures_a_quantized_tensor() -> None:
    nodes = [node("Conv", ["x", "w"], ["c"]), _if("flag", "c")]
    types = {"flag": TensorProto.BOOL}
    model = build(nodes, {**IMAGE, "flag": []}, {"y": [1, 4, 4, 4]}, {"w": W}, types=types)
    data = [{"x": normal(1, 3, 4, 4, seed=i), "flag": np.asarray(i % 2 == 0)} for i in range(4)]
    result = quantize(model, data=data)
    assert_sound(model, result.model)
    assert sqnr(model, result, data) > 28
    assert "its bodies stay float" in result.record.float_nodes["if"]


def test_a_body_that_captures_a_quantized_output() -> None:
    nodes = [node("Conv", ["x", "w"], ["c"]), _if("flag", "c")]
    types = {"flag": TensorProto.BOOL}
    outputs = {"c": [1, 4, 4, 4], "y": [1, 4, 4, 4]}
    model = build(nodes, {**IMAGE, "flag": []}, outputs, {"w": W}, types=types)
    data = [{"x": normal(1, 3, 4, 4, seed=i), "flag": np.asarray(i % 2 == 0)} for i in range(4)]
    result = quantize(model, data=data)
    assert_sound(model, result.model)
    assert sqnr(model, result, data) > 28


def test_a_body_that_captures_a_quantized_weight() -> None:
    nodes = [node("Conv", ["x", "w"], ["c"]), _if("flag", "v"), node("Add", ["c", "v"], ["z"])]
    types = {"flag": TensorProto.BOOL}
    constants = {"w": W, "v": normal(1, 4, 4, 4)}
    outputs = {"y": [1, 4, 4, 4], "z": [1, 4, 4, 4]}
    model = build(nodes, {**IMAGE, "flag": []}, outputs, constants, types=types)
    data = [{"x": normal(1, 3, 4, 4, seed=i), "flag": np.asarray(i % 2 == 0)} for i in range(4)]
    result = quantize(model, data=data, prepare={"fold_constants": False})
    assert_sound(model, result.model)
    np.testing.assert_array_equal(initializers(result.model)["v"], constants["v"])
    assert sqnr(model, result, data) > 28


def test_a_loop_over_a_quantized_tensor() -> None:
    body = helper.make_graph(
        [node("Add", ["carried", "c"], ["next"]), node("Identity", ["go"], ["go_on"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("carried", TensorProto.FLOAT, [1, 4, 4, 4]),
        ],
        [
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, [1, 4, 4, 4]),
        ],
    )
    nodes = [node("Conv", ["x", "w"], ["c"]), node("Loop", ["n", "", "c"], ["y"], name="loop", body=body)]
    model = build(nodes, IMAGE, {"y": [1, 4, 4, 4]}, {"w": W, "n": np.asarray(3, np.int64)})
    _checked(model)


def test_a_weight_of_an_excluded_and_a_quantized_node() -> None:
    nodes = [
        node("Conv", ["x", "w"], ["a"], name="quantized"),
        node("Conv", ["x", "w"], ["b"], name="float"),
        node("Add", ["a", "b"], ["y"], name="add"),
    ]
    model = build(nodes, IMAGE, ["y"], {"w": W})
    result = _checked(model, selection={"exclude": ["float"]})
    np.testing.assert_array_equal(initializers(result)["w"], W)
    assert "w" in weights(result)
    reads = {n.name: n.input[1] for n in result.graph.node if n.op_type == "Conv"}
    assert reads["float"] == "w"
    assert reads["quantized"] == "w_DequantizeLinear_Output"


def test_a_weight_that_is_a_graph_output() -> None:
    model = build([node("Conv", ["x", "w"], ["y"])], IMAGE, ["y", "w"], {"w": W})
    data = feeds({"x": [1, 3, 4, 4]})
    result = quantize(model, data=data).model
    assert_sound(model, result)
    np.testing.assert_array_equal(run(result, data[0])[1], W)


def test_a_weight_that_two_layers_share() -> None:
    nodes = [node("Conv", ["x", "w"], ["a"]), node("Conv", ["z", "w"], ["b"]), node("Add", ["a", "b"], ["y"])]
    result = _checked(build(nodes, {**IMAGE, "z": [1, 3, 4, 4]}, ["y"], {"w": W}))
    assert [name for name in initializers(result) if name.startswith("w")] == [
        "w_quantized",
        "w_scale",
        "w_zero_point",
    ]


def test_bounds_and_padding_values_stay_constants() -> None:
    """6 is an operand of Div and the bound of Clip; only the operand may become integers."""
    nodes = [
        node("Conv", ["x", "w"], ["c"], name="conv"),
        node("Clip", ["c", "zero", "six"], ["k"], name="clip"),
        node("Div", ["k", "six"], ["y"], name="div"),
    ]
    constants = {"w": W, "zero": np.float32(0), "six": np.float32(6)}
    result = _checked(build(nodes, IMAGE, ["y"], constants))
    [clip] = [n for n in result.graph.node if n.op_type == "Clip"]
    assert list(clip.input)[1:] == ["zero", "six"]
    [div] = [n for n in result.graph.node if n.op_type == "Div"]
    assert div.input[1] == "six_DequantizeLinear_Output"


def test_an_operand_read_twice_by_one_node() -> None:
    result = _checked(build([node("Mul", ["x", "x"], ["y"])], {"x": [2, 4]}, ["y"]))
    [mul] = [n for n in result.graph.node if n.op_type == "Mul"]
    assert list(mul.input) == ["x_DequantizeLinear_Output"] * 2


def test_one_pair_for_each_reader() -> None:
    nodes = [node("Tanh", ["x"], ["a"]), node("Sigmoid", ["x"], ["b"]), node("Add", ["a", "b"], ["y"])]
    model = build(nodes, {"x": [2, 4]}, ["y"])
    count = {
        dedicated: sum(
            n.op_type == "QuantizeLinear" and n.input[0] == "x"
            for n in _checked(model, placement={"dedicated_pairs": dedicated}).graph.node
        )
        for dedicated in (False, True)
    }
    assert count == {False: 1, True: 2}


def test_weights_only_needs_no_data() -> None:
    nodes = [node("Conv", ["x", "w", "b"], ["c"]), node("Relu", ["c"], ["y"])]
    model = build(nodes, IMAGE, ["y"], {"w": W, "b": normal(4)})
    result = roundel.quantize(model, recipe="a8w8", changes={"placement": {"weights_only": True}})
    assert_sound(model, result.model)
    assert not activations(result.model)
    assert set(weights(result.model)) == {"w"}
    np.testing.assert_array_equal(initializers(result.model)["b"], normal(4))


def test_outputs_of_some_operators_stay_float() -> None:
    nodes = [node("Conv", ["x", "w"], ["c"]), node("Tanh", ["c"], ["t"]), node("Neg", ["t"], ["y"])]
    model = build(nodes, IMAGE, ["y"], {"w": W})
    stored = activations(_checked(model, placement={"skip_output_op_types": ["Tanh"]}))
    assert set(stored) == {"x", "c"}


@pytest.mark.parametrize(
    ("domain", "opset", "expected"),
    [
        ("auto", None, "com.microsoft"),
        ("auto", 21, ""),
        ("ai.onnx", 21, ""),
        ("com.microsoft", 21, "com.microsoft"),
    ],
)
def test_where_sixteen_bit_pairs_live(domain: str, opset: int | None, expected: str) -> None:
    model = build([node("Conv", ["x", "w"], ["y"])], IMAGE, ["y"], {"w": W})
    changes: dict[str, Any] = {"placement": {"domain": domain}, "output": {"opset": opset}}
    stored = activations(_checked(model, "a16w8", **changes))
    assert {s.domain for s in stored.values()} == {expected}


def test_sixteen_bits_need_another_domain_or_opset() -> None:
    model = build([node("Conv", ["x", "w"], ["y"])], IMAGE, ["y"], {"w": W})
    with pytest.raises(RecipeError, match="16-bit") as caught:
        quantize(model, "a16w8", placement={"domain": "ai.onnx"})
    assert "output.opset: 21" in str(caught.value.hint)


def test_an_override_to_sixteen_bits_in_the_standard_domain() -> None:
    model = build([node("Conv", ["x", "w"], ["y"])], IMAGE, ["y"], {"w": W})
    override = {"tensors": ["x"], "type": "int16"}
    stored = activations(_checked(model, "s8s8_aaws", overrides=[override]))
    assert (stored["x"].domain, stored["y"].domain) == ("com.microsoft", "")


def test_a_model_without_output_shapes() -> None:
    model = build([node("Conv", ["x", "w"], ["y"])], IMAGE, ["y"], {"w": W})
    model.graph.output[0].type.tensor_type.ClearField("shape")
    result = quantize(model, data=feeds({"x": [1, 3, 4, 4]}))
    assert result.record.quantized


def test_missing_optional_inputs_and_outputs() -> None:
    nodes = [
        node("Resize", ["x", "", "scales"], ["r"]),
        node("MaxPool", ["r"], ["p", ""], kernel_shape=[2, 2]),
        node("LayerNormalization", ["p", "s"], ["y", "", ""]),
    ]
    constants = {"scales": np.float32([1, 1, 2, 2]), "s": normal(7) + 2}
    result = _checked(build(nodes, IMAGE, ["y"], constants))
    assert ops(result) == ["Resize", "MaxPool", "LayerNormalization"]
