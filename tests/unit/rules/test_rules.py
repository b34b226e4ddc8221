"""Each of P01 to P22 on a model that triggers it, and on one that does not."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from roundel.plain import to_plain
from roundel.plan.select import choose_nodes, operator_rules
from roundel.recipe.load import load_recipe
from roundel.rules import Finding, Severity, check, graphs
from roundel.rules.facts import gather_facts
from roundel.rules.report import RULES
from roundel.targets.npu import device_named


def _found(model: onnx.ModelProto, rule: str, preset: Any = "a8w8", device: str = "stx") -> list[Finding]:
    return [f for f in check(model, preset=preset, device=device).findings if f.rule == rule]


def _two_convs(net: Any) -> Any:
    net.conv()
    net.conv()
    return net


def test_rules_are_numbered_without_gaps() -> None:
    numbers = [rule.id for rule in RULES]
    assert numbers == [f"P{n:02}" for n in range(1, 32)] + [f"Q{n:02}" for n in range(1, 18)]


@pytest.mark.parametrize("preset", ["a8w8", "xint8"])
def test_clean_model_has_no_findings(clean: Any, preset: str) -> None:
    report = check(clean.proto(), preset=preset, device="stx")
    assert report.findings == ()
    assert report.passed
    assert report.before == report.after


def test_p01_opset(make: Any) -> None:
    old = _two_convs(make(opset=10)).proto()
    (found,) = _found(old, "P01")
    assert found.severity is Severity.ERROR
    assert found.automatic
    assert "opset 10" in found.message
    (found,) = _found(_two_convs(make(opset=13)).proto(), "P01")
    assert found.severity is Severity.NOTE
    assert not _found(_two_convs(make()).proto(), "P01")


def test_p02_open_shapes(make: Any) -> None:
    (found,) = _found(_two_convs(make((1, 8, "height", 16))).proto(), "P02")
    assert found.severity is Severity.ERROR
    assert "height" in found.message
    assert "prepare.fixed_shapes" in found.fix
    assert not _found(_two_convs(make(("N", 8, 16, 16))).proto(), "P02")


def test_p02_sizes_that_depend_on_the_data(make: Any) -> None:
    net = _two_convs(make())
    data = net.x
    net.add("Compress", data, net.add("Cast", net.reshape(-1), to=TensorProto.BOOL))
    (found,) = _found(net.proto(), "P02")
    assert found.severity is Severity.WARNING
    assert "depend on the data" in found.message


def test_p02_shapes_computed_from_an_open_batch(make: Any) -> None:
    net = _two_convs(make(("N", 8, 16, 16)))
    data = net.x
    size = net.add("Slice", net.add("Shape", data), *(net.const(np.asarray([v], np.int64)) for v in (0, 1)))
    rest = net.const(np.asarray([-1], np.int64))
    net.add("Reshape", data, net.add("Concat", size, rest, axis=0))
    (found,) = _found(net.proto(), "P02")
    assert found.severity is Severity.WARNING
    assert "3 nodes compute shapes" in found.message
    assert "image: [1, 8, 16, 16]" in found.fix
    fixed = {"extends": "a8w8", "prepare": {"fixed_shapes": {"image": (1, 8, 16, 16)}}}
    assert check(net.proto(), preset=fixed).before.cpu_nodes == 0


def test_p03_fixed_batch(make: Any) -> None:
    (found,) = _found(_two_convs(make((8, 8, 16, 16))).proto(), "P03")
    assert found.severity is Severity.ERROR
    assert "8" in found.message
    assert not _found(_two_convs(make()).proto(), "P03")


def test_p04_few_convs(make: Any) -> None:
    net = make()
    net.conv()
    (found,) = _found(net.proto(), "P04")
    assert "1 Conv" in found.message
    assert check(net.proto(), preset="a8w8").before.npu_nodes == 0
    assert not _found(net.proto(), "P04", "bf16")
    net.conv()
    assert not _found(net.proto(), "P04")


def test_p05_control_flow(make: Any) -> None:
    net = _two_convs(make())
    body = helper.make_graph(
        [helper.make_node("Relu", [net.x], ["inner"], name="inner")],
        "body",
        [],
        [helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)],
    )
    flag = net.const(np.asarray(True))
    net.inputs.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
    assert not _found(net.proto(), "P05")
    del net.weights[flag]
    net.add("If", "flag", then_branch=body, else_branch=body, name="choice")
    (found,) = _found(net.proto(), "P05")
    assert found.subject == "choice"
    assert "2 nodes" in found.message


def test_p06_implicit_attributes(make: Any, clean: Any) -> None:
    net = _two_convs(make())
    net.add("Conv", net.x, net.weight(8, 8, 1, 1), name="bare")
    (found,) = _found(net.proto(), "P06")
    assert found.subject == "bare"
    assert "5 attributes" in found.message
    assert found.automatic
    assert not _found(clean.proto(), "P06")


@pytest.mark.parametrize(
    ("attributes", "severity"),
    [
        ({"ceil_mode": 1, "strides": [2, 2], "kernel_shape": [3, 3]}, Severity.WARNING),
        ({"ceil_mode": 1, "strides": [2, 2], "kernel_shape": [2, 2]}, Severity.NOTE),
        ({"pads": [0, 0, 1, 1], "kernel_shape": [2, 2]}, Severity.WARNING),
        ({"pads": [1, 1, 1, 1], "kernel_shape": [3, 3]}, None),
    ],
)
def test_p07_pool_rounding(make: Any, attributes: dict[str, Any], severity: Severity | None) -> None:
    net = _two_convs(make())
    net.add("MaxPool", **attributes)
    assert [f.severity for f in _found(net.proto(), "P07")] == ([severity] if severity else [])


def test_p07_says_both_sizes(make: Any) -> None:
    net = _two_convs(make())
    net.add("AveragePool", ceil_mode=1, strides=[2, 2], kernel_shape=[3, 3])
    assert "makes 8x8, the compiler expects 7x7" in _found(net.proto(), "P07")[0].message


def test_p08_conv_and_clip(make: Any) -> None:
    net = make()
    net.conv()
    net.clip()
    net.depthwise()
    net.clip()
    net.conv()
    for preset in ("xint8", "a8w8"):
        (found,) = _found(net.proto(), "P08", preset)
        assert "Clip(0, 6)" in found.message
        assert found.subject == "Conv_0"
        assert found.automatic
    assert not _found(net.proto(), "P08", "a16w8")
    assert not _found(net.proto(), "P08", "xint8", "phx")


def test_p08_is_not_automatic_where_the_bound_cannot_be_rescaled(make: Any) -> None:
    net = make()
    net.conv()
    kept = net.clip()
    net.conv()
    net.add("Add", net.x, kept)  # Add reads the Clip, too
    (found,) = _found(net.proto(), "P08", "xint8")
    assert not found.automatic
    assert check(net.proto(), preset="xint8").after.cpu_nodes == 2


def test_p08_depthwise_conv_and_relu_in_xint8(make: Any) -> None:
    net = make()
    net.conv()
    net.depthwise()
    net.relu()
    net.conv()
    (found,) = _found(net.proto(), "P08", "xint8")
    assert "depthwise" in found.message
    assert not found.automatic
    assert not _found(net.proto(), "P08", "a8w8")


def test_p09_sigmoid_in_xint8(make: Any) -> None:
    net = _two_convs(make())
    net.silu()
    (found,) = _found(net.proto(), "P09", "xint8")
    assert found.subject == "Sigmoid_2"
    assert not _found(net.proto(), "P09", "a8w8")
    assert not _found(net.proto(), "P09", "xint8", "phx")


def test_p10_channel_shuffle(make: Any) -> None:
    net = _two_convs(make())
    net.reshape(1, 2, 4, 16, 16)
    net.add("Transpose", perm=[0, 2, 1, 3, 4], name="mix")
    net.reshape(1, 8, 16, 16)
    net.conv()
    (found,) = _found(net.proto(), "P10")
    assert found.subject == "mix"
    assert "5-D" in found.message
    flat = _two_convs(make())
    flat.reshape(1, 8, 256)
    flat.add("Transpose", perm=[0, 2, 1])
    flat.reshape(1, 256, 8, 1)
    assert not _found(flat.proto(), "P10")


def test_p11_norm_behind_concat(make: Any) -> None:
    net = make()
    left = net.conv()
    net.add("Concat", left, net.conv(), axis=2)
    net.norm()
    net.relu()
    net.conv()
    (found,) = _found(net.proto(), "P11")
    assert found.automatic
    assert "2 tensors" in found.message
    assert not _found(net.proto(), "P11", "xint8")[0].automatic
    folded = make()
    folded.conv()
    folded.norm()
    folded.conv()
    assert not _found(folded.proto(), "P11")


def test_p12_not_in_the_table(make: Any, clean: Any) -> None:
    net = make()
    net.conv()
    net.add("ConvTranspose", net.x, net.weight(8, 8, 2, 2), strides=[2, 2])
    net.conv()
    (found,) = _found(net.proto(), "P12", "xint8")
    assert found.severity is Severity.NOTE
    assert "1 ConvTranspose" in found.message
    assert "% of MACs" in found.message
    assert not _found(net.proto(), "P12", "a8w8")
    assert not _found(clean.proto(), "P12", "bf16")  # Relu is not listed, and known to run


def _yolo_head(net: Any, *, scores: bool) -> Any:
    net.conv()
    trunk = net.relu()
    boxes = net.conv(trunk)
    raw = net.conv(trunk)
    net.add("Concat", boxes, net.add("Sigmoid", raw) if scores else raw, axis=1, name="head")
    return net


def test_p13_detection_head(make: Any) -> None:
    net = _yolo_head(make(), scores=True)
    (found,) = _found(net.proto(), "P13")
    assert found.subject == "head"
    assert "Sigmoid" in found.message
    assert not _found(_yolo_head(make(), scores=False).proto(), "P13")
    assert not _found(net.proto(), "P13", "bf16")


def test_p13_proposes_an_exclusion_that_works(make: Any) -> None:
    model = _yolo_head(make(), scores=True).proto()
    (found,) = _found(model, "P13")
    border = found.fix.split("'")[1]
    start, end = (side.split(",") for side in border.split("->"))
    recipe = load_recipe(
        {"extends": "a8w8", "selection": {"exclude_subgraphs": [{"inputs": start, "outputs": end}]}}
    )
    prepared = gather_facts(model, "a8w8", device_named("stx")).prepared
    nodes = choose_nodes(prepared, recipe, operator_rules(prepared.graph, recipe))
    assert not nodes["head"].quantized
    assert nodes["Conv_0"].quantized


def test_p13_box_decoding_and_dfl(make: Any) -> None:
    net = make()
    net.conv()
    trunk = net.relu()
    net.conv(trunk)
    net.add("Softmax", axis=1)
    net.conv()
    boxes = net.add("Mul", net.x, net.const(np.full((1, 1, 1, 1), 8, np.float32)))
    net.conv(trunk)
    net.add("Concat", boxes, net.add("Sigmoid"), axis=1)
    (found,) = _found(net.proto(), "P13")
    assert "box arithmetic" in found.message


def test_p14_half_precision(make: Any, clean: Any) -> None:
    net = _two_convs(make())
    for name in list(net.weights):
        net.const(net.array(name).astype(np.float16), name)
    net.inputs[0].type.tensor_type.elem_type = TensorProto.FLOAT16
    model = net.proto()
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT16
    (found,) = _found(model, "P14")
    assert found.automatic
    assert not _found(clean.proto(), "P14")


def test_p15_size(clean: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _found(clean.proto(), "P15")
    monkeypatch.setattr(graphs, "PROTOBUF_BYTES", 100)
    (found,) = _found(clean.proto(), "P15")
    assert "external_data" in found.fix


def test_p16_weights_as_inputs(make: Any, clean: Any) -> None:
    net = _two_convs(make())
    name = next(iter(net.weights))
    net.inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, net.array(name).shape))
    (found,) = _found(net.proto(), "P16")
    assert found.subject == name
    assert not _found(clean.proto(), "P16")


def test_p17_bf16_doubts(make: Any, clean: Any) -> None:
    net = _two_convs(make())
    first = net.x
    net.add("PRelu", first, net.weight(8, 1, 1), name="slopes")
    found = _found(net.proto(first, net.x), "P17", "bf16")
    assert {f.subject for f in found} == {first, "slopes"}
    assert "2 outputs" in found[0].message
    assert not _found(net.proto(first, net.x), "P17", "a8w8")
    assert not _found(clean.proto(), "P17", "bf16")


def test_p18_sixteen_bit_domain(clean: Any) -> None:
    (found,) = _found(clean.proto(), "P18", "a16w8")
    assert "com.microsoft" in found.message
    native = {"extends": "a16w8", "output": {"opset": 21}}
    assert not _found(clean.proto(), "P18", native)
    assert not _found(clean.proto(), "P18", "a8w8")


@pytest.mark.parametrize("preset", ["a8w8", "a16w8", "bf16"])
def test_p19_format_on_device(clean: Any, preset: str) -> None:
    (found,) = _found(clean.proto(), "P19", preset, "phx")
    assert found.severity is Severity.ERROR
    assert preset in found.message
    for device in ("stx", "krk"):
        assert not _found(clean.proto(), "P19", preset, device)
    assert not _found(clean.proto(), "P19", "xint8", "phx")


def test_p20_bias_overflow(make: Any, clean: Any) -> None:
    net = _two_convs(make())
    tiny = net.const(np.full((8, 8, 1, 1), 1e-7, np.float32))
    net.add("Conv", net.x, tiny, net.const(np.full(8, 50, np.float32)), name="wide")
    (found,) = _found(net.proto(), "P20")
    assert found.subject == "wide"
    assert "peak stays below" in found.message
    assert not _found(clean.proto(), "P20")
    assert not _found(net.proto(), "P20", "xint8")  # int8 biases have a scale of their own


def test_p21_broken_weights(make: Any, clean: Any) -> None:
    net = make()
    net.conv()
    weight = next(iter(net.weights))
    net.conv()
    array = net.array(weight).copy()
    array[:2] = 0
    net.const(array, weight)
    (found,) = _found(net.proto(), "P21")
    assert (found.severity, found.subject) == (Severity.NOTE, weight)
    assert "2 of 8" in found.message
    net.const(np.zeros_like(array), weight)
    assert _found(net.proto(), "P21")[0].severity is Severity.WARNING
    array[0, 0] = np.nan
    net.const(array, weight)
    (found,) = _found(net.proto(), "P21")
    assert found.severity is Severity.ERROR
    assert "1 of 64" in found.message
    assert not _found(clean.proto(), "P21")


def test_p22_unnamed_nodes(make: Any, clean: Any) -> None:
    net = _two_convs(make())
    net.add("Relu", name="")
    (found,) = _found(net.proto(), "P22")
    assert "1 of 3" in found.message
    assert not _found(clean.proto(), "P22")


def test_findings_say_everything(make: Any) -> None:
    net = make((8, 8, 16, 16), opset=13)
    net.conv(kernel=3)
    net.clip()
    net.add("Conv", net.x, net.weight(8, 8, 1, 1), name="")
    report = check(net.proto(), preset="xint8", device="stx")
    assert {"P01", "P03", "P06", "P08", "P22"} <= {f.rule for f in report.findings}
    for finding in report.findings:
        assert all((finding.message, finding.why, finding.fix, finding.title))
        assert any(c.isdigit() for c in finding.message)
        assert set(to_plain(finding)) == {field.name for field in dataclasses.fields(Finding)}
    order = [f.severity for f in report.findings]
    assert order == sorted(order, key=list(Severity).index)
    assert not report.passed


def test_source_is_not_changed(clean: Any) -> None:
    model = clean.proto()
    before = model.SerializeToString()
    check(model, preset="xint8")
    assert model.SerializeToString() == before
    assert numpy_helper.to_array(model.graph.initializer[0]).size
