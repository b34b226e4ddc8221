"""Models that are quantized already: format, and what is wrong with them (Q01 to Q12, P20)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import roundel
from helpers import build, node, normal
from roundel.rules import CheckReport, Severity, check


def _quantized(model: onnx.ModelProto, preset: str, **changes: Any) -> onnx.ModelProto:
    data = roundel.RandomData()
    return roundel.quantize(model, recipe=preset, data=data, samples=2, changes=changes or None).model


def _rules(report: CheckReport, rule: str) -> list[Any]:
    return [f for f in report.findings if f.rule == rule]


def _change(model: onnx.ModelProto, name: str, array: Any) -> None:
    for tensor in model.graph.initializer:
        if tensor.name == name:
            tensor.CopyFrom(numpy_helper.from_array(np.asarray(array), name))
            return
    raise AssertionError(name)


def _array(model: onnx.ModelProto, name: str) -> Any:
    return next(numpy_helper.to_array(t) for t in model.graph.initializer if t.name == name)


def _names(model: onnx.ModelProto, suffix: str) -> list[str]:
    return [t.name for t in model.graph.initializer if t.name.endswith(suffix)]


@pytest.mark.parametrize("preset", ["xint8", "a8w8", "a16w8", "xint8_signed"])
def test_roundels_own_models_are_recognised_and_clean(clean: Any, preset: str) -> None:
    report = check(_quantized(clean.proto(), preset))
    assert report.quantized
    assert report.format == preset.removesuffix("_signed")
    assert {f.rule for f in report.findings} <= {"P18"}
    assert (report.before.islands, report.before.cpu_nodes) == (1, 0)


def test_split_is_the_one_of_the_float_model(architecture: Any) -> None:
    model = architecture("mobilenet_v2")
    report = check(_quantized(model, "a8w8"), device="stx")
    assert (report.before.cpu_nodes, report.before.islands) == (36, 18)
    assert report.after.islands == 1  # MinMax scales end at or below 6
    plain = check(model, preset="a8w8", device="stx")
    assert report.before.npu_share == plain.before.npu_share
    assert not any(f.automatic for f in report.findings)


def test_gain_behind_hard_sigmoid_goes_with_it(make: Any) -> None:
    net = make()
    net.conv()
    net.add("HardSigmoid", alpha=1 / 6, beta=0.5)
    net.conv()
    report = check(_quantized(net.proto(), "xint8"), device="stx")
    assert [n.op for n in report.before.nodes if n.rule] == ["HardSigmoid", "Mul"]
    assert report.before.islands == 2


def test_q01_scales(clean: Any) -> None:
    model = _quantized(clean.proto(), "a8w8")
    found = _rules(check(model, preset="xint8"), "Q01")
    assert found
    assert all(f.severity is Severity.ERROR for f in found)
    assert not _rules(check(model), "Q01")
    assert not _rules(check(_quantized(clean.proto(), "xint8"), preset="xint8"), "Q01")


def test_q01_one_scale_of_an_xint8_model(clean: Any) -> None:
    model = _quantized(clean.proto(), "xint8")
    name = next(n for n in _names(model, "_scale") if n.startswith("t0_") or n.startswith("w"))
    _change(model, name, _array(model, name) * np.float32(1.1))
    report = check(model)
    assert report.format == "xint8"
    assert len(_rules(report, "Q01")) == 1


def test_q02_per_channel(clean: Any) -> None:
    model = _quantized(clean.proto(), "a8w8", weights={"per_channel": True})
    found = _rules(check(model), "Q02")
    assert "8 scales along axis 0" in found[0].message
    assert found[0].severity is Severity.NOTE
    assert _rules(check(model, preset="xint8"), "Q02")[0].severity is Severity.ERROR
    assert not _rules(check(_quantized(clean.proto(), "a8w8")), "Q02")


def test_q03_zero_point_127(clean: Any) -> None:
    model = _quantized(clean.proto(), "xint8")
    assert not _rules(check(model), "Q03")
    for name in _names(model, "_zero_point"):
        if _array(model, name).dtype == np.uint8:
            _change(model, name, np.uint8(127))
    found = _rules(check(model), "Q03")
    assert found
    assert all("127" in f.message and f.severity is Severity.ERROR for f in found)


def test_q03_asymmetric(clean: Any) -> None:
    model = _quantized(clean.proto(), "u8s8_aaws")
    assert all(f.severity is Severity.NOTE for f in _rules(check(model, device="stx"), "Q03"))
    found = _rules(check(model, device="phx"), "Q03")
    assert found
    assert found[0].severity is Severity.ERROR


def test_q04_bias_types(clean: Any) -> None:
    powers = {"activations": {"scale": "power_of_two"}, "weights": {"scale": "power_of_two"}}
    model = _quantized(clean.proto(), "a8w8", **powers)
    report = check(model)
    assert report.format == "xint8"
    found = _rules(report, "Q04")
    assert len(found) == 3
    assert "int32 bias" in found[0].message
    floats = check(_quantized(clean.proto(), "a8w8", bias={"type": "float"}))
    assert "float bias" in _rules(floats, "Q04")[0].message
    assert not _rules(check(_quantized(clean.proto(), "xint8")), "Q04")


def test_q05_gap(clean: Any) -> None:
    model = _quantized(clean.proto(), "a8w8", selection={"exclude": ["Conv_2", "Relu_3"]})
    report = check(model)
    found = _rules(report, "Q05")
    assert {f.subject for f in found} == {"Conv_2", "Relu_3"}
    assert report.before.islands == 2
    assert not _rules(check(_quantized(clean.proto(), "a8w8")), "Q05")


def _pool_and_concat(make: Any) -> onnx.ModelProto:
    net = make()
    left = net.conv()
    net.add("Concat", left, net.conv(left), axis=1)
    net.add("MaxPool", kernel_shape=[2, 2], strides=[2, 2])
    net.add("Conv", net.x, net.weight(8, 16, 1, 1), net.weight(8))
    return _quantized(net.proto(), "xint8")


def test_q06_uneven_scales(make: Any) -> None:
    model = _pool_and_concat(make)
    assert not _rules(check(model), "Q06")
    pair = next(n for n in model.graph.node if n.op_type == "QuantizeLinear" and n.input[0] == "t0")
    other = numpy_helper.from_array(np.asarray(_array(model, pair.input[1]) / 2), "half")
    model.graph.initializer.append(other)
    for each in model.graph.node:
        if each.name.startswith("t0_"):
            each.input[1] = "half"
    found = _rules(check(model), "Q06")
    assert "Concat from positions" in found[0].message


def test_q07_shift_limits(clean: Any) -> None:
    model = _quantized(clean.proto(), "xint8")
    assert not _rules(check(model), "Q07")
    weight = next(n for n in model.graph.node if n.name.startswith("w0_Dequantize"))
    _change(model, weight.input[1], np.float32(2.0**-40))
    found = _rules(check(model), "Q07")
    assert any("shift_cut" in f.message and "allowed 0 to 16" in f.message for f in found)


def test_q08_order(clean: Any) -> None:
    model = _quantized(clean.proto(), "a8w8")
    assert not _rules(check(model), "Q08")
    first = model.graph.node.pop(0)
    model.graph.node.append(first)
    assert "1 nodes" in _rules(check(model), "Q08")[0].message


def test_q09_knows_that_groups_share_the_scales_of_a_transposed_convolution() -> None:
    weights = {"w": normal(4, 3, 2, 2), "b": normal(6)}
    nodes = [node("ConvTranspose", ["x", "w", "b"], ["y"], name="c", group=2, kernel_shape=[2, 2])]
    model = build(nodes, {"x": [1, 4, 5, 5]}, ["y"], weights)
    assert not _rules(check(_quantized(model, "a8w8", weights={"per_channel": True})), "Q09")


def test_q09_bias_scale(clean: Any) -> None:
    model = _quantized(clean.proto(), "a8w8")
    assert not _rules(check(model), "Q09")
    name = _names(model, "_quantized_scale")[0]
    _change(model, name, _array(model, name) * 4)
    (found,) = _rules(check(model), "Q09")
    assert "4 times" in found.message


def test_p20_bias_cut_off(clean: Any) -> None:
    model = _quantized(clean.proto(), "a8w8")
    assert not _rules(check(model), "P20")
    name = next(n for n in _names(model, "_quantized") if _array(model, n).dtype == np.int32)
    codes = _array(model, name).copy()
    codes[:3] = np.iinfo(np.int32).max
    _change(model, name, codes)
    (found,) = _rules(check(model), "P20")
    assert found.severity is Severity.ERROR
    assert "3 of" in found.message


def test_q10_other_forms(clean: Any) -> None:
    model = _quantized(clean.proto(), "uint8_dynamic_quant")
    found = _rules(check(model), "Q10")
    assert found
    assert all(f.severity is Severity.ERROR for f in found)


def test_q11_other_format(clean: Any) -> None:
    model = _quantized(clean.proto(), "a8w8")
    assert "shows a8w8" in _rules(check(model, preset="xint8"), "Q11")[0].message
    assert not _rules(check(model, preset="a8w8"), "Q11")
    assert not _rules(check(model), "Q11")


def test_q12_uneven_pair(clean: Any) -> None:
    model = _quantized(clean.proto(), "a8w8")
    assert not _rules(check(model), "Q12")
    other = numpy_helper.from_array(np.float32(0.5), "other")
    model.graph.initializer.append(other)
    half = next(n for n in model.graph.node if n.op_type == "DequantizeLinear" and n.name.startswith("image"))
    half.input[1] = "other"
    assert _rules(check(model), "Q12")[0].subject == "image"


def test_bfloat16_casts(clean: Any) -> None:
    model = clean.proto()
    down = helper.make_node("Cast", ["image"], ["narrow"], name="down", to=TensorProto.BFLOAT16)
    up = helper.make_node("Cast", ["narrow"], ["again"], name="up", to=TensorProto.FLOAT)
    model.graph.node[0].input[0] = "again"
    model.graph.node.insert(0, up)
    model.graph.node.insert(0, down)
    report = check(model)
    assert report.format == "bf16"
    assert "Cast" not in {n.op for n in report.before.nodes}
    assert report.before.islands == 1


def test_onnx_runtimes_quantizer(clean: Any, tmp_path: Path) -> None:
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = 2

        def get_next(self) -> dict[str, Any] | None:
            self.left -= 1
            rng = np.random.default_rng(self.left + 1)
            return {"image": rng.random((1, 8, 16, 16), np.float32)} if self.left >= 0 else None

    onnx.save(clean.proto(), tmp_path / "float.onnx")
    kind = QuantType.QInt8
    options = {"ActivationSymmetric": True}
    quantize_static(
        tmp_path / "float.onnx",
        tmp_path / "ort.onnx",
        Reader(),
        activation_type=kind,
        weight_type=kind,
        extra_options=options,
    )
    report = check(tmp_path / "ort.onnx")
    assert report.format == "a8w8"
    assert report.passed
    assert report.before.islands == 1
