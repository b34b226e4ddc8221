"""Node counts of a Phoenix NPU's reports, against what is predicted for networks of the same structure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

import roundel
from npu_files import QdqNet, fixture_model
from roundel.kit.npu_report import parse_json
from roundel.kit.placement import compare_with_check
from roundel.rules import Severity, check

Net = Any


def _resnet(net: Net, blocks: tuple[int, ...]) -> None:
    net.conv(kernel=7, stride=2)
    net.relu()
    net.add("MaxPool", net.x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    for stage, count in enumerate(blocks):
        for block in range(count):
            before, stride = net.x, 2 if stage and not block else 1
            net.conv()
            net.relu()
            net.conv(kernel=3, stride=stride)
            net.relu()
            after = net.conv()
            skip = before if block else net.conv(before, stride=stride)
            net.add("Add", after, skip)
            net.relu()
    net.classifier()


def resnet50(make: type) -> onnx.ModelProto:
    net = make((1, 8, 224, 224))
    _resnet(net, (3, 4, 6, 3))
    return net.proto()


def resnet50_at_128(make: type) -> onnx.ModelProto:
    net = make((1, 8, 128, 128))
    _resnet(net, (3, 4, 6, 3))
    return net.proto()


def wide_resnet101(make: type) -> onnx.ModelProto:
    net = make((1, 8, 224, 224))
    _resnet(net, (3, 4, 23, 3))
    return net.proto()


def regnetx_002(make: type) -> onnx.ModelProto:
    net = make((1, 8, 224, 224))
    net.conv(kernel=3, stride=2)
    net.relu()
    for count in (1, 1, 4, 7):
        for block in range(count):
            before, stride = net.x, 1 if block else 2
            net.conv()
            net.relu()
            net.conv(kernel=3, stride=stride, group=8)
            net.relu()
            after = net.conv()
            skip = before if block else net.conv(before, stride=stride)
            net.add("Add", after, skip)
            net.relu()
    net.classifier()
    return net.proto()


def mobilenet_v2(make: type) -> onnx.ModelProto:
    net = make((1, 8, 224, 224))
    net.conv(kernel=3, stride=2)
    net.clip()
    for block in range(17):
        before = net.x
        if block:
            net.conv()
            net.clip()
        net.depthwise(stride=2 if block in (1, 3, 6, 13) else 1)
        net.clip()
        net.conv()
        if block in (2, 4, 5, 7, 8, 9, 11, 12, 14, 15):
            net.add("Add", before, net.x)
    net.conv()
    net.clip()
    return net.classifier().proto()


@pytest.mark.parametrize(
    ("build", "total", "on_npu"),
    [
        (resnet50, 395, 393),
        (resnet50_at_128, 394, 392),
        (wide_resnet101, 769, 767),
        (regnetx_002, 326, 324),
        (mobilenet_v2, 349, 347),
    ],
)
def test_counts_of_measured_networks(
    make: type, build: Callable[[type], onnx.ModelProto], total: int, on_npu: int
) -> None:
    made = _quantized(build(make))
    counts = check(made, device="phx").counts
    assert counts is not None
    assert (counts.all, counts.npu, counts.cpu, counts.edge) == (total, on_npu, 0, 2)


def _quantized(model: onnx.ModelProto) -> onnx.ModelProto:
    for tensor in model.graph.initializer:
        if tensor.name.startswith("w"):  # a hundred layers of random weights would overflow
            calm = onnx.numpy_helper.to_array(tensor) * np.float32(0.2)
            tensor.CopyFrom(onnx.numpy_helper.from_array(calm, tensor.name))
    data = roundel.RandomData()
    return roundel.quantize(
        model, preset="xint8_plain", data=data, samples=1, device="phx", effort="none"
    ).model


def test_one_conv_and_one_product() -> None:
    counts = check(fixture_model(32, 1, 0), device="phx").counts
    assert counts is not None
    assert (counts.all, counts.npu, counts.edge) == (7, 5, 2)
    net = QdqNet(1, 4, 8, 8)
    net.nodes.clear()
    net.inputs.append(onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, [1, 4, 8, 8]))
    net.pair(4, net.add("Mul", net.pair(3, "x"), net.pair(7, "z")))
    counts = check(net.model(), device="phx").counts
    assert counts is not None
    assert (counts.all, counts.npu) == (7, 4)


@pytest.mark.parametrize("cut", [0, 1, 4, 16])
def test_a_conv_within_the_shifts_is_taken(cut: int) -> None:
    assert check(fixture_model(32, cut, 0), device="phx").before.npu_nodes == 1


@pytest.mark.parametrize("cut", [-14, -8, 17, 24])
def test_a_conv_beyond_the_shifts_is_not(cut: int) -> None:
    report = check(fixture_model(32, cut, 0), device="phx")
    assert report.counts is not None
    assert (report.before.npu_nodes, report.counts.npu) == (0, 0)
    assert any(f.rule == "Q07" and f.severity is Severity.ERROR for f in report.findings)


def _ends(make: type, tail: Callable[[Net], Any]) -> onnx.ModelProto:
    net = make()
    net.conv(kernel=3)
    net.relu()
    net.conv()
    tail(net)
    return net.proto()


def test_last_bilinear_resize_by_8_stays_on_the_cpu_and_by_2_does_not(make: type) -> None:
    def resized(factor: float) -> Callable[[Net], Any]:
        def add(net: Net) -> None:
            scales = net.const(np.asarray([1, 1, factor, factor], np.float32))
            net.add("Resize", net.x, "", scales, mode="linear")

        return add

    for factor, cpu, edge in ((8, 1, 4), (2, 0, 2)):
        counts = check(_quantized(_ends(make, resized(factor))), device="phx").counts
        assert counts is not None
        assert (counts.cpu, counts.edge) == (cpu, edge)


def _between(make: type, middle: Callable[[Net], Any]) -> onnx.ModelProto:
    net = make()
    net.conv(kernel=3)
    middle(net)
    net.conv()
    return net.proto()


def _attention(net: Net) -> None:
    source = net.x
    turned = net.add("Transpose", source, perm=[0, 1, 3, 2])
    net.add("MatMul", source, turned)


def _ibnorm(net: Net) -> None:
    source = net.x
    ends = [net.const(np.asarray(v, np.int64)) for v in ([0], [4], [8], [1])]
    left = net.add("Slice", source, ends[0], ends[1], ends[3])
    right = net.add("Slice", source, ends[1], ends[2], ends[3])
    weight, bias = net.const(np.ones(4, np.float32)), net.const(np.zeros(4, np.float32))
    net.add("Concat", left, net.add("InstanceNormalization", right, weight, bias), axis=1)


def _five_dimensions(net: Net) -> None:
    net.reshape(1, 2, 4, 16, 16)
    net.relu()
    net.reshape(1, 8, 16, 16)


@pytest.mark.parametrize("middle", [_attention, _ibnorm, _five_dimensions])
def test_what_ejects_every_conv(make: type, middle: Callable[[Net], Any]) -> None:
    report = check(_between(make, middle), preset="xint8", device="phx")
    assert report.before.npu_nodes == 0
    assert {f.rule for f in report.findings} >= {"P25"}
    assert "P25" not in {f.rule for f in check(_between(make, middle), preset="xint8").findings}


def test_norms_between_reshapes_keep_their_neighbours(make: type) -> None:
    def group_norm(net: Net) -> None:
        net.reshape(1, 2, -1)
        weight, bias = net.const(np.ones(2, np.float32)), net.const(np.zeros(2, np.float32))
        net.add("InstanceNormalization", net.x, weight, bias)
        net.reshape(1, 8, 16, 16)

    report = check(_between(make, group_norm), preset="xint8", device="phx")
    places = {node.op: node.place.value for node in report.before.nodes}
    assert places["InstanceNormalization"] == "cpu"
    assert places["Conv"] == "npu"
    assert any(f.rule == "P24" for f in report.findings)


def test_hard_sigmoid_clip_and_transposed_conv_run(make: type) -> None:
    net = make()
    net.conv(kernel=3)
    net.clip()
    net.add("HardSigmoid", net.x, alpha=1 / 6, beta=0.5)
    net.add(
        "ConvTranspose", net.x, net.weight(8, 8, 2, 2), net.weight(8), strides=[2, 2], kernel_shape=[2, 2]
    )
    assert check(net.proto(), preset="xint8", device="phx").before.cpu_nodes == 0


def test_npu_report_tells_another_file_by_its_total(tmp_path: Any) -> None:
    file = tmp_path / "conv.onnx"
    onnx.save(fixture_model(32, 1, 0), file)
    for total, suspicious in ((7, False), (395, True)):
        stats = [{"name": "NPU", "nodeNum": total - 2}, {"name": "VITIS_EP_CPU", "nodeNum": 2}]
        compared = compare_with_check(parse_json({"deviceStat": stats}), file, device="phx")
        assert compared.rows[0].quantity == "operators in all"
        assert compared.rows[0].predicted == 7
        assert any("another file was compiled" in note for note in compared.notes) is suspicious
