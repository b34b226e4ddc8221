"""Which format a model is in, and which device takes it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

import roundel
from roundel.errors import ModelError, RecipeError
from roundel.example import load_example
from roundel.kit.kit import check_device, provider_options, vaiml_config
from roundel.model import load_model
from roundel.qdq.read import strip_pairs
from roundel.rules.formats import Recognised, intended, recognise
from roundel.targets.npu import DEVICES, Format, device_named

from .conftest import MICROSOFT, QUARK, build, initializer, qdq_model, saved


def recognised(model: onnx.ModelProto) -> Recognised:
    return recognise(ir.from_proto(model), load_model(model, allow_quantized=True).model)


def kind(model: onnx.ModelProto) -> Format:
    return recognised(model).format


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (qdq_model(), Format.XINT8),
        (qdq_model(act="uint8", zero=128), Format.XINT8),
        (qdq_model(bias="int8"), Format.XINT8),
        (qdq_model(bias="int32"), Format.A8W8),
        (qdq_model(scale=0.1), Format.A8W8),
        (qdq_model(per_channel=True), Format.A8W8),
        (qdq_model(act="uint8", zero=3), Format.A8W8),
        (qdq_model(act="int16", domain=MICROSOFT), Format.A16W8),
        (qdq_model(act="uint16", zero=32768, domain=MICROSOFT, scale=0.1), Format.A16W8),
    ],
)
def test_integer_formats(model: onnx.ModelProto, wanted: Format) -> None:
    assert kind(model) is wanted


def test_the_reason_says_why_it_is_not_xint8() -> None:
    assert "4 of 6" in recognised(qdq_model(scale=0.1)).reason


def test_asymmetric_zero_points_are_noted() -> None:
    assert "1.6" in " ".join(recognised(qdq_model(act="uint8", zero=3)).notes)


@pytest.mark.parametrize("preset", ["a8w8", "a16w8"])
def test_own_presets(preset: str) -> None:
    example = load_example()
    result = roundel.quantize(example.model_path, recipe=preset, data=example.calibration[:4])
    assert kind(result.model).value.lower() == preset


def test_constants_from_constant_nodes_count() -> None:
    model = qdq_model()
    scale = next(i for i in model.graph.initializer if i.name == "s")
    model.graph.initializer.remove(scale)
    model.graph.node.insert(0, helper.make_node("Constant", [], ["s"], value=scale))
    assert kind(model) is Format.XINT8


def cast_model() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Cast", ["x"], ["b"], to=TensorProto.BFLOAT16),
        helper.make_node("Cast", ["b"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Relu", ["f"], ["y"]),
    ]
    return build(nodes, [])


def quark_model(dtype: int) -> onnx.ModelProto:
    zero = helper.make_tensor("z", dtype, [], [0])
    nodes = [
        helper.make_node("ExtendedQuantizeLinear", ["x", "s", "z"], ["q"], domain=QUARK),
        helper.make_node("ExtendedDequantizeLinear", ["q", "s", "z"], ["d"], domain=QUARK),
        helper.make_node("Relu", ["d"], ["y"]),
    ]
    return build(nodes, [initializer("s", 1.0), zero], domains=(QUARK,))


def test_bfloat16_casts() -> None:
    assert kind(cast_model()) is Format.BF16


def test_bfloat16_weights() -> None:
    weight = helper.make_tensor("w", TensorProto.BFLOAT16, [1], [1.0])
    nodes = [
        helper.make_node("Cast", ["w"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["x", "f"], ["y"]),
    ]
    assert kind(build(nodes, [weight])) is Format.BF16


def test_quark_bfloat16_pairs_and_their_missing_library() -> None:
    found = recognised(quark_model(TensorProto.BFLOAT16))
    assert found.format is Format.BF16
    assert "custom operators" in found.notes[0]


def test_quark_integer_pairs() -> None:
    assert kind(quark_model(TensorProto.INT16)) is Format.A16W8


def test_functions_with_quark_names_need_no_library() -> None:
    model = quark_model(TensorProto.BFLOAT16)
    for name, to in (("Quantize", TensorProto.BFLOAT16), ("Dequantize", TensorProto.FLOAT)):
        body = [helper.make_node("Cast", ["a"], ["r"], to=to)]
        opsets = [helper.make_opsetid("", 17)]
        function = helper.make_function(QUARK, f"Extended{name}Linear", ["a", "s", "z"], ["r"], body, opsets)
        model.functions.append(function)
    found = recognised(model)
    assert found.format is Format.BF16
    assert not found.notes


def test_a_block_format_hidden_in_a_function_is_refused() -> None:
    model = build(
        [helper.make_node("BFPQuantizeDequantize", ["x"], ["y"], domain=QUARK)], [], domains=(QUARK,)
    )
    body = [helper.make_node("Relu", ["a"], ["r"])]
    opsets = [helper.make_opsetid("", 17)]
    model.functions.append(helper.make_function(QUARK, "BFPQuantizeDequantize", ["a"], ["r"], body, opsets))
    with pytest.raises(ModelError, match="do not take"):
        recognised(model)


def test_float() -> None:
    assert kind(build([helper.make_node("Relu", ["x"], ["y"])], [])) is Format.FLOAT


def test_half_precision_is_refused() -> None:
    half = initializer("h", np.ones((1, 2, 4, 4)), "float16")
    model = build([helper.make_node("Cast", ["h"], ["y"], to=TensorProto.FLOAT)], [half])
    with pytest.raises(ModelError, match="half precision"):
        recognised(model)


def test_dynamic_quantization_is_refused() -> None:
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    with pytest.raises(ModelError, match="do not take"):
        recognised(build(nodes, []))


def test_sixteen_bit_weights_are_refused() -> None:
    with pytest.raises(ModelError, match="16-bit weights"):
        recognised(qdq_model(act="int16", weight="int16", domain=MICROSOFT))


def test_computed_scales_are_refused() -> None:
    model = qdq_model()
    scale = next(i for i in model.graph.initializer if i.name == "s")
    scale.name = "s0"
    model.graph.node.insert(0, helper.make_node("Abs", ["s0"], ["s"]))
    with pytest.raises(ModelError, match="run time"):
        recognised(model)


def test_computed_zero_points_are_refused() -> None:
    model = qdq_model()
    zero = next(i for i in model.graph.initializer if i.name == "z")
    zero.name = "z0"
    model.graph.node.insert(0, helper.make_node("Identity", ["z0"], ["z"]))
    with pytest.raises(ModelError, match="A zero point is computed at run time"):
        recognised(model)


def test_what_a_model_is_and_what_it_was_meant_as() -> None:
    """An int32 bias makes it no XINT8 for the compiler; its activations show that it was meant as such."""
    model = qdq_model(bias="int32")
    assert kind(model) is Format.A8W8
    assert intended(strip_pairs(load_model(model, allow_quantized=True).model)).format is Format.XINT8


def test_a_mixture_is_refused() -> None:
    model = qdq_model()
    model.graph.node[0].input[0] = "f"
    model.graph.node.insert(0, helper.make_node("Cast", ["x"], ["b"], to=TensorProto.BFLOAT16))
    model.graph.node.insert(1, helper.make_node("Cast", ["b"], ["f"], to=TensorProto.FLOAT))
    with pytest.raises(ModelError, match="mixes"):
        recognised(model)


@pytest.mark.parametrize("name", ["phx", "hpt"])
@pytest.mark.parametrize("kind", [k for k in Format if k is not Format.XINT8])
def test_the_first_npu_takes_xint8_only(name: str, kind: Format) -> None:
    with pytest.raises(ModelError, match="does not take") as caught:
        check_device(Recognised(kind, "because"), DEVICES[name])
    assert caught.value.expected == "XINT8"


@pytest.mark.parametrize("name", ["stx", "stx-halo", "krk"])
@pytest.mark.parametrize("kind", list(Format))
def test_the_second_npu_takes_all(name: str, kind: Format) -> None:
    check_device(Recognised(kind, "because"), DEVICES[name])


def test_device_names_are_forgiving_but_not_guessed() -> None:
    assert device_named(" STX_HALO ").name == "stx-halo"
    with pytest.raises(RecipeError, match="no device 'stxx'"):
        device_named("stxx")


def test_options_per_device_and_format() -> None:
    integer = provider_options(Format.A8W8, DEVICES["stx"], "key")
    assert integer["target"] == "X2"
    assert "xclbin" not in integer
    assert "config_file" not in integer
    old = provider_options(Format.XINT8, DEVICES["phx"], "key")
    assert old["target"] == "X1"
    assert old["xclbin"].endswith("4x4.xclbin")
    assert old["xlnx_enable_py3_round"] == "0"
    brain = provider_options(Format.FLOAT, DEVICES["krk"], "key")
    assert brain["config_file"] == "vaiml_config.json"
    assert "target" not in brain
    for options in (integer, old, brain):
        assert options["enable_cache_file_io_in_mem"] == "0"
        assert {"cache_dir", "cache_key"} <= set(options)
        assert not {"cacheDir", "cacheKey"} & set(options)


def test_unknown_optimize_level() -> None:
    with pytest.raises(RecipeError, match="optimization level"):
        vaiml_config(4)


def test_saved_files_are_recognised_alike(tmp_path: Path) -> None:
    path = saved(qdq_model(), tmp_path / "m.onnx")
    assert recognise(ir.load(path), load_model(path, allow_quantized=True).model).format is Format.XINT8
