"""Phoenix (X1): good files broken in every silent way, and in others; each is caught, and no good one is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import roundel
from npu_files import fixture_model
from roundel.rules import Severity, check

Model = onnx.ModelProto
Change = Callable[[Model], None]
_ARCHITECTURES = ("resnet18", "squeezenet", "mobilenet_v2", "efficientnet_b0", "shufflenet_v2")


def _quantized(model: Model, preset: str = "xint8_plain") -> Model:
    data = roundel.RandomData()
    return roundel.quantize(model, preset=preset, data=data, samples=2, device="phx", effort="none").model


@pytest.fixture
def good(make: Any) -> Model:
    """A small network with a residual sum, pools, Concat and a classifier, quantized."""
    net = make()
    net.conv(kernel=3)
    net.relu()
    before = net.add("MaxPool", net.x, kernel_shape=[2, 2], strides=[2, 2])
    net.conv(kernel=3)
    net.clip()
    net.depthwise()
    net.add("Add", net.x, before)
    net.relu()
    after = net.x
    net.conv()
    net.add("Concat", net.x, after, axis=1)
    net.add("GlobalAveragePool")
    net.add("Flatten")
    net.add("Gemm", net.x, net.weight(4, 16), net.weight(4), transB=1)
    return _quantized(net.proto())


def _arrays(model: Model) -> dict[str, Any]:
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


def _set(model: Model, name: str, array: Any) -> None:
    tensor = next(t for t in model.graph.initializer if t.name == name)
    tensor.CopyFrom(numpy_helper.from_array(np.asarray(array), name))


def _pairs(model: Model) -> list[onnx.NodeProto]:
    return [n for n in model.graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]


def _weights(model: Model, index: int = 1) -> list[onnx.NodeProto]:
    """DQ nodes of weights, or of biases with index 2."""
    makers = {n.output[0]: n for n in model.graph.node}
    layers = [n for n in model.graph.node if n.op_type in ("Conv", "Gemm") and len(n.input) > index]
    return [makers[n.input[index]] for n in layers]


def _activations(model: Model) -> list[onnx.NodeProto]:
    constant = {id(n) for n in (*_weights(model), *_weights(model, 2))}
    return [n for n in _pairs(model) if id(n) not in constant and n.input[0] not in _arrays(model)]


def _rescale(model: Model, nodes: list[onnx.NodeProto], factor: float) -> None:
    for name in {n.input[1] for n in nodes}:
        _set(model, name, _arrays(model)[name] * np.float32(factor))


def _own_scale(model: Model, node: onnx.NodeProto, scale: Any, zero: Any) -> None:
    """A scale and a zero point that no other node shares."""
    for index, (kind, array) in enumerate((("scale", scale), ("zero", zero)), start=1):
        name = f"{node.name}_{kind}_own"
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
        node.input[index] = name


def _foreign_domain(model: Model) -> None:
    for node in _pairs(model):
        node.domain = "com.microsoft"
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))


def _per_channel(model: Model) -> None:
    for node in _weights(model):
        arrays = _arrays(model)
        count = arrays[node.input[0]].shape[0]
        scale = np.full(count, arrays[node.input[1]], np.float32)
        _own_scale(model, node, scale, np.zeros(count, np.int8))
        node.attribute.append(helper.make_attribute("axis", 0))


def _product_bias(model: Model) -> None:
    makers = {n.output[0]: n for n in model.graph.node}
    for layer in [n for n in model.graph.node if n.op_type in ("Conv", "Gemm")]:
        arrays = _arrays(model)
        x, w, b = (makers[name] for name in layer.input[:3])
        real = arrays[b.input[0]] * arrays[b.input[1]]
        step = np.float32(arrays[x.input[1]] * arrays[w.input[1]])
        _set(model, b.input[0], np.rint(real / step).astype(np.int32) + np.int32(500))
        _own_scale(model, b, step, np.int32(0))


def _batch(model: Model) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2


def _recast(model: Model, nodes: list[onnx.NodeProto], dtype: Any, zero: int) -> None:
    for name in {n.input[2] for n in nodes}:
        _set(model, name, np.asarray(zero, dtype))


def _a16(model: Model) -> None:
    _foreign_domain(model)
    _recast(model, _activations(model), np.int16, 0)


def _a8w8(model: Model) -> None:
    _rescale(model, _pairs(model), 1.37)
    _product_bias(model)


def _zero_points(model: Model) -> None:
    _recast(model, _activations(model), np.uint8, 127)


def _one_zero_point(model: Model) -> None:
    quantizer = _activations(model)[2]
    for node in [n for n in _pairs(model) if n.input[1] == quantizer.input[1]]:
        _own_scale(model, node, _arrays(model)[node.input[1]], np.uint8(100))


def _uneven_pair(model: Model) -> None:
    node = [n for n in _activations(model) if n.op_type == "DequantizeLinear"][1]
    _own_scale(model, node, _arrays(model)[node.input[1]] * np.float32(2), np.uint8(128))


def _scale(model: Model, value: float) -> None:
    _set(model, _activations(model)[0].input[1], np.float32(value))


def _cut(model: Model) -> None:
    node = _weights(model)[0]
    _own_scale(model, node, _arrays(model)[node.input[1]] * np.float32(2.0**-17), np.int8(0))


def _bias_shift(model: Model) -> None:
    node = _weights(model, 2)[0]
    _own_scale(model, node, _arrays(model)[node.input[1]] * np.float32(2.0**20), np.int8(0))


def _bias_off_grid(model: Model) -> None:
    _rescale(model, _weights(model, 2), 1.3)


def _runtime_scale(model: Model) -> None:
    node = _weights(model)[0]
    made = helper.make_node("Abs", [node.input[1]], ["computed_scale"], name="computed")
    reduced = helper.make_node("ReduceMax", [model.graph.input[0].name], ["top"], name="top", keepdims=0)
    product = helper.make_node("Mul", ["computed_scale", "top"], ["run_scale"], name="product")
    node.input[1] = "run_scale"
    rest = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([made, reduced, product, *rest])


def _asymmetric_weights(model: Model) -> None:
    node = _weights(model)[0]
    _own_scale(model, node, _arrays(model)[node.input[1]], np.int8(5))


def _uneven_pool(model: Model) -> None:
    pool = next(n for n in model.graph.node if n.op_type == "MaxPool")
    behind = next(n for n in _pairs(model) if n.input[0] == pool.output[0])
    for node in [n for n in _pairs(model) if n.input[0] in (pool.output[0], behind.output[0])]:
        _own_scale(model, node, _arrays(model)[node.input[1]] * np.float32(2), np.uint8(128))


def _qlinear(model: Model) -> None:
    node = next(n for n in model.graph.node if n.op_type == "MaxPool")
    dynamic = helper.make_node("DynamicQuantizeLinear", [node.input[0]], ["dq", "ds", "dz"], name="dynamic")
    back = helper.make_node("DequantizeLinear", ["dq", "ds", "dz"], ["d"], name="back")
    place = list(model.graph.node).index(node)
    node.input[0] = "d"
    rest = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*rest[:place], dynamic, back, *rest[place:]])


def _open_size(model: Model) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "height"


def _float_tail(model: Model) -> None:
    """A decode tail behind the last layers: two float paths that are joined."""
    last = model.graph.output[0].name
    for name, op in (("left", "Exp"), ("right", "Sigmoid")):
        model.graph.node.append(helper.make_node(op, [last], [name], name=name))
    model.graph.node.append(helper.make_node("Concat", ["left", "right"], ["joined"], name="join", axis=1))
    model.graph.output[0].name = "joined"
    model.graph.output[0].type.tensor_type.ClearField("shape")


_SILENT: dict[str, tuple[Change, str]] = {
    "Q/DQ in com.microsoft": (_foreign_domain, "Q15"),
    "per-channel weights": (_per_channel, "Q02"),
    "int32 bias at the product scale": (_product_bias, "Q16"),
    "activation scales off the grid": (lambda m: _rescale(m, _activations(m)[:-2], 1.01), "Q01"),
    "weight scales off the grid": (lambda m: _rescale(m, _weights(m), 1.01), "Q01"),
    "batch of 2": (_batch, "P03"),
    "A8W8": (_a8w8, "P19"),
    "A16W8": (_a16, "P19"),
}
_OTHERS: dict[str, tuple[Change, str]] = {
    "zero point 127": (_zero_points, "Q03"),
    "one zero point off the centre": (_one_zero_point, "Q03"),
    "pair whose halves differ": (_uneven_pair, "Q12"),
    "scale of zero": (lambda m: _scale(m, 0.0), "Q13"),
    "infinite scale": (lambda m: _scale(m, np.inf), "Q13"),
    "negative scale": (lambda m: _scale(m, -0.5), "Q13"),
    "scale computed at run time": (_runtime_scale, "Q13"),
    "shift_cut beyond 16": (_cut, "Q07"),
    "shift_bias beyond its range": (_bias_shift, "Q07"),
    "bias scales off the grid": (_bias_off_grid, "Q01"),
    "asymmetric weights": (_asymmetric_weights, "Q03"),
    "uneven pool": (_uneven_pool, "Q06"),
    "dynamic quantization": (_qlinear, "Q10"),
    "open height": (_open_size, "P02"),
    "float tail that joins tensors": (_float_tail, "P25"),
}


@pytest.mark.parametrize("name", [*_SILENT, *_OTHERS])
def test_every_mutation_is_caught(good: Model, name: str) -> None:
    change, number = {**_SILENT, **_OTHERS}[name]
    broken = onnx.ModelProto()
    broken.CopyFrom(good)
    change(broken)
    for device in ("phx", "hpt"):
        report = check(broken, device=device)
        assert not report.passed, name
        found = {f.rule for f in report.findings if f.severity is Severity.ERROR}
        assert number in found, (name, found)


@pytest.mark.parametrize("name", _ARCHITECTURES)
@pytest.mark.parametrize("preset", ["xint8_plain", "xint8_signed"])
def test_good_files_raise_no_alarm(architecture: Callable[[str], Model], name: str, preset: str) -> None:
    report = check(_quantized(architecture(name), preset), device="phx")
    errors = [f for f in report.findings if f.severity is Severity.ERROR]
    assert not errors
    assert {f.rule for f in report.findings if f.severity is Severity.WARNING} <= {"P10", "P23", "Q05"}


def test_int32_bias_at_its_own_scale_is_a_warning(good: Model) -> None:
    changed = onnx.ModelProto()
    changed.CopyFrom(good)
    for node in _weights(changed, 2):
        codes = _arrays(changed)[node.input[0]]
        _set(changed, node.input[0], codes.astype(np.int32))
        _own_scale(changed, node, _arrays(changed)[node.input[1]], np.int32(0))
    report = check(changed, device="phx")
    assert report.passed
    assert {f.severity for f in report.findings if f.rule == "Q16"} == {Severity.WARNING}


def test_a_scale_vector_of_one_element_is_taken() -> None:
    model = fixture_model(4, 1, 0)
    weight = _weights(model)[0]
    _own_scale(model, weight, np.asarray([1], np.float32), np.asarray([0], np.int8))
    weight.attribute.append(helper.make_attribute("axis", 0))
    report = check(model, device="phx")
    assert report.passed
    assert report.before.npu_nodes == 1


def test_winml_and_xclbin_are_told(good: Model) -> None:
    report = check(good, device="phx")
    assert any(f.rule == "P26" and "1.8" in f.message for f in report.findings)
    assert not any(f.rule == "P26" for f in check(good, device="stx").findings)
    broken = onnx.ModelProto()
    broken.CopyFrom(good)
    _a8w8(broken)
    assert any(f.rule == "P19" and "WinML" in f.why for f in check(broken, device="phx").findings)


@pytest.mark.parametrize("change", [{"bias.type": "int32"}, {"placement.domain": "com.microsoft"}])
def test_quantize_for_phoenix_refuses_before_it_runs(clean: Any, change: dict[str, Any]) -> None:
    data = roundel.RandomData()
    with pytest.raises(roundel.RecipeError, match="without a message"):
        roundel.quantize(clean.proto(), preset="xint8_plain", data=data, device="phx", changes=change)
    roundel.quantize(clean.proto(), preset="xint8_plain", data=data, samples=1, changes=change)


def test_quantize_for_phoenix_refuses_a_batch(make: Any) -> None:
    net = make((2, 8, 16, 16))
    net.conv()
    with pytest.raises(roundel.ModelError, match="first sample only"):
        roundel.quantize(net.proto(), preset="xint8", data=roundel.RandomData(), device="phx")


def test_gate_catches_what_the_recipe_does_not_show(clean: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from roundel.rules import phoenix

    monkeypatch.setattr(phoenix, "refuse_recipe", lambda *_: None)
    with pytest.raises(roundel.ModelError, match="rightly"):
        roundel.quantize(
            clean.proto(),
            preset="xint8_plain",
            data=roundel.RandomData(),
            device="phx",
            changes={"placement.domain": "com.microsoft"},
        )


def test_deploy_refuses_what_phoenix_gets_wrong(good: Model, tmp_path: Path) -> None:
    broken = onnx.ModelProto()
    broken.CopyFrom(good)
    _foreign_domain(broken)
    file = tmp_path / "model.onnx"
    onnx.save(broken, file)
    with pytest.raises(roundel.ModelError, match="rightly"):
        roundel.deploy(file, tmp_path / "kit", device="phx")
    onnx.save(good, file)
    kit = roundel.deploy(file, tmp_path / "kit", device="phx")
    assert "1.7.1" in (kit.folder / "README.md").read_text(encoding="utf-8")
