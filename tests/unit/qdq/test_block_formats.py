"""Block formats from recipe to file: which tensors, along which axis, with which numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import roundel
from helpers import build, feeds, node, normal
from roundel.errors import ModelError, RecipeError
from roundel.numerics.blocks import BlockFloat, MicroExponents, Microscaling
from roundel.qdq.functions import attach, strip
from roundel.qdq.functions.blocks import BFP, MX, read_format
from roundel.qdq.nodes import QUARK

PRESETS = {
    "bfp16": BlockFloat(),
    "mx4": MicroExponents(11),
    "mx6": MicroExponents(13),
    "mx9": MicroExponents(16),
    "mxfp8e5m2": Microscaling("fp8_e5m2"),
    "mxfp8e4m3": Microscaling("fp8_e4m3"),
    "mxfp6e3m2": Microscaling("fp6_e3m2"),
    "mxfp6e2m3": Microscaling("fp6_e2m3"),
    "mxfp4e2m1": Microscaling("fp4_e2m1"),
    "mxint8": Microscaling("int8"),
}


def model(batch: int | str = 1) -> onnx.ModelProto:
    """Convolution, fully connected, attention: each with its own idea of an axis."""
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], name="conv"),
        node("Relu", ["c"], ["r"], name="relu"),
        node("GlobalAveragePool", ["r"], ["g"], name="pool"),
        node("Flatten", ["g"], ["f"], name="flatten"),
        node("Gemm", ["f", "v", "d"], ["h"], name="gemm", transB=1),
        node("MatMul", ["h", "m"], ["t"], name="matmul"),
        node("Softmax", ["t"], ["y"], name="softmax", axis=1),
    ]
    constants = {
        "w": normal(20, 3, 3, 3),
        "b": normal(20, seed=1),
        "v": normal(12, 20, seed=2),
        "d": normal(12, seed=3),
        "m": normal(12, 10, seed=4),
    }
    return build(nodes, {"x": [batch, 3, 8, 8]}, {"y": [batch, 10]}, constants)


DATA = feeds({"x": [1, 3, 8, 8]}, count=2)


def block_nodes(proto: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    return {n.input[0]: n for n in proto.graph.node if n.domain == QUARK}


def axis_of(proto_node: onnx.NodeProto) -> int:
    return next(a.i for a in proto_node.attribute if a.name == "axis")


def run(proto: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    return np.asarray(ort.InferenceSession(proto.SerializeToString()).run(None, {"x": x})[0])


@pytest.mark.parametrize(("preset", "form"), PRESETS.items())
def test_presets(preset: str, form: Any) -> None:
    result = roundel.quantize(model(), recipe=preset, data=DATA)
    found = block_nodes(result.model)
    assert set(found) == {*"xwbcrgfvdhmt", "y_QuantizeLinear_Input"}
    assert {read_format(n) for n in result.ir.graph if n.domain == QUARK} == {form}
    assert result.record.outputs[0].cosine > 0.8


def test_axes_are_those_that_are_summed_over() -> None:
    found = block_nodes(roundel.quantize(model(), recipe="bfp16", data=DATA).model)
    axes = {name: axis_of(n) for name, n in found.items()}
    # Vectors have one axis; a Gemm with transB sums over its weight's last, a MatMul over its first.
    assert axes == {
        **dict.fromkeys("bd", 0),
        **dict.fromkeys(("x", "w", "c", "r", "g", "f", "v"), 1),
        "h": -1,
        "m": 0,
        "t": 1,  # MatMul says -1, the Softmax behind it 1
        "y_QuantizeLinear_Input": 1,
    }
    plain = roundel.quantize(model(), recipe="bfp16", data=DATA, changes={"blocks": {"refine_axis": False}})
    assert axis_of(block_nodes(plain.model)["m"]) == 1


def test_an_axis_that_a_tensor_does_not_have() -> None:
    changes = {"blocks": {"axis": 3, "refine_axis": False}}
    found = block_nodes(roundel.quantize(model(), recipe="mxint8", data=DATA, changes=changes).model)
    assert {name: axis_of(found[name]) for name in "wvb"} == {"w": 3, "v": 1, "b": 0}


def test_weights_are_what_the_numerics_make_of_them() -> None:
    """A product with the identity shows the weight that the session computes with."""
    weight = normal(16, 24)
    small = build(
        [node("MatMul", ["x", "w"], ["y"], name="mm")], {"x": [16, 16]}, {"y": [16, 24]}, {"w": weight}
    )
    changes = {"placement": {"weights_only": True}}
    data = [{"x": np.eye(16, dtype=np.float32)}]
    result = roundel.quantize(small, recipe="mx6", data=data, changes=changes)
    np.testing.assert_array_equal(run(result.model, data[0]["x"]), MicroExponents(13).apply(weight, 0))


def test_an_open_batch_stays_open() -> None:
    proto = roundel.quantize(model("n"), recipe="bfp16", data=DATA).model
    x = np.concatenate([sample["x"] for sample in feeds({"x": [1, 3, 8, 8]}, count=5)])
    whole = run(proto, x)
    assert whole.shape == (5, 10)
    # No value of another sample lies in a block of this one.
    np.testing.assert_allclose(whole[3:4], run(proto, x[3:4]), rtol=1e-5)


def test_the_bare_form_has_no_functions() -> None:
    changes = {"output": {"strip_functions": True}}
    result = roundel.quantize(model(), recipe="bfp16", data=DATA, changes=changes)
    assert not result.model.functions
    assert {n.op_type for n in result.model.graph.node if n.domain} == {BFP}
    attached = ir.to_proto(attach(result.ir))
    whole = roundel.quantize(model(), recipe="bfp16", data=DATA).model
    np.testing.assert_array_equal(run(attached, DATA[0]["x"]), run(whole, DATA[0]["x"]))


def test_two_formats_in_one_model() -> None:
    changes = {"weights": {"type": "mxfp6e2m3"}}
    result = roundel.quantize(model(), recipe="mx9", data=DATA, changes=changes)
    kinds = {n.op_type for n in result.model.graph.node if n.domain == QUARK}
    assert kinds == {BFP, MX}
    assert run(result.model, DATA[0]["x"]).shape == (1, 10)


@pytest.mark.parametrize(("preset", "read_by_layers"), [("bf16_mixed_bfp16", BFP), ("bf16_mixed_mxint8", MX)])
def test_mixed_floats(preset: str, read_by_layers: str) -> None:
    result = roundel.quantize(model(), recipe=preset, data=DATA)
    found = {n.input[0]: n.op_type for n in result.model.graph.node if n.domain == QUARK}
    assert {found[name] for name in "xwfvhm"} == {read_by_layers}
    assert {found[name] for name in ("r", "g", "t", "y_QuantizeLinear_Input")} == {"ExtendedQuantizeLinear"}
    assert "b" not in found


def test_mixed_integers() -> None:
    result = roundel.quantize(model(), recipe="s16s16_mixed_s8s8", data=DATA)
    types = {name: tensor.scheme.qtype.value for name, tensor in result.plan.tensors.items()}
    assert {types[name] for name in "xwbfvdhm"} == {"int8"}
    assert {types[name] for name in "rgty"} == {"int16"}


@pytest.mark.parametrize(
    ("recipe", "changes", "told"),
    [
        ("a8w8", {"blocks": {"axis": 2}}, "does not use"),
        ("mxfp8e4m3", {"blocks": {"rounding": "half_up"}}, "blocks.rounding"),
        ("bfp16", {"blocks": {"sub_block_size": 4}}, "blocks.sub_block_size"),
        ("mx9", {"blocks": {"sub_block_size": 3}}, "divide"),
        ("mx9", {"blocks": {"compiler": True}}, "blocks.compiler"),
        ("a8w8", {"mixed": {"op_types": ["Conv"]}}, "mixed.type"),
        ("a8w8", {"mixed": {"type": "bfp16"}}, "bias.type"),
    ],
)
def test_options_without_effect_are_refused(recipe: str, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(RecipeError) as caught:
        roundel.load_recipe(recipe, changes)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("op", "attributes", "told"),
    [
        (MX, {"element_dtype": "fp7"}, "fp7"),
        (MX, {"rounding_mode": 3}, "rounding_mode 3"),
        (BFP, {"bfp_method": "to_bfp_second"}, "to_bfp_second"),
        (BFP, {"bit_width": 9}, "bit_width 9"),
        (BFP, {"bfp_method": "to_bfp_prime", "block_size": 9}, "sub_block_size 2"),
    ],
)
def test_attributes_that_nobody_knows(op: str, attributes: dict[str, Any], told: str) -> None:
    attrs = ir.convenience.convert_attributes(attributes)
    with pytest.raises(ModelError) as caught:
        read_format(ir.Node(QUARK, op, [], attributes=attrs, num_outputs=1, name="n"))
    assert told in str(caught.value)


def test_functions_come_and_go() -> None:
    result = roundel.quantize(model(), recipe="bfp16", data=DATA)
    bare = strip(result.ir)
    assert not bare.functions
    assert len(result.ir.functions) > 1
    again = ir.to_proto(attach(bare))
    assert {f.overload for f in again.functions} == {f.overload for f in result.model.functions}


def test_half_precision_tensors() -> None:
    """AMD's operator takes float16, too: computed in float32, and rounded back."""
    x = normal(4, 40).astype(np.float16)
    one = onnx.helper.make_node(BFP, ["x"], ["y"], "n", domain=QUARK, axis=1, rounding_mode=2)
    kind = onnx.TensorProto.FLOAT16
    values = [onnx.helper.make_tensor_value_info(name, kind, [4, 40]) for name in "xy"]
    graph = onnx.helper.make_graph([one], "g", values[:1], values[1:])
    imports = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid(QUARK, 1)]
    bare = onnx.helper.make_model(graph, opset_imports=imports, ir_version=8)
    got = run(ir.to_proto(attach(ir.from_proto(bare))), x)
    assert got.dtype == np.float16
    np.testing.assert_array_equal(got, BlockFloat().apply(x, 1).astype(np.float16))
