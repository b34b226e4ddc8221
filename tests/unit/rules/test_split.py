"""The predicted split against the placement that AMD's logs show (spec: CPU operators, NPU subgraphs)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from roundel.rules import Place, check

Architecture = Callable[[str], onnx.ModelProto]
_SHARED = Path(__file__).resolve().parents[4] / "shared" / "models"

# model, format, nodes on the CPU, NPU islands. In XINT8, AMD counts the Mul behind each HardSigmoid, too.
_LOGS = [
    ("resnet18", "xint8", 0, 1),
    ("resnet18", "a8w8", 0, 1),
    ("resnet18", "a16w8", 0, 1),
    ("squeezenet", "xint8", 1, 1),
    ("squeezenet", "a8w8", 1, 1),
    ("squeezenet", "a16w8", 1, 1),
    ("mobilenet_v2", "xint8", 36, 18),
    ("mobilenet_v2", "a8w8", 36, 18),
    ("mobilenet_v2", "a16w8", 0, 1),
    ("efficientnet_b0", "xint8", 130 // 2, 66),
    ("efficientnet_b0", "a8w8", 0, 1),
    ("efficientnet_b0", "a16w8", 0, 1),
    ("shufflenet_v2", "a8w8", 48, 17),
    ("shufflenet_v2", "a16w8", 48, 17),
]


@pytest.mark.parametrize(("name", "preset", "cpu", "islands"), _LOGS)
def test_counts_of_amds_logs(
    architecture: Architecture, name: str, preset: str, cpu: int, islands: int
) -> None:
    before = check(architecture(name), preset=preset, device="stx").before
    assert (before.cpu_nodes, before.islands) == (cpu, islands)


def test_shufflenet_in_xint8_loses_its_mean_unless_it_becomes_a_pool(architecture: Architecture) -> None:
    model = architecture("shufflenet_v2")
    kept = {"extends": "xint8", "prepare": {"reduce_mean_to_global_average_pool": False}}
    before = check(model, preset=kept).before
    assert (before.cpu_nodes + 1, before.islands) == (50, 18)  # the log counts the mean's Mul, too
    before = check(model, preset="xint8").before
    assert (before.cpu_nodes, before.islands) == (48, 17)


def test_densenet_in_xint8_has_the_cuts_of_the_log(architecture: Architecture) -> None:
    before = check(architecture("densenet121"), preset="xint8").before
    assert before.islands == 63
    assert before.cpu_nodes == 2 * 62  # the log leaves the 58 dense layers on the CPU as well: not explained


@pytest.mark.parametrize("preset", ["xint8", "a8w8"])
def test_legalisation_joins_the_islands_of_mobilenet_v2(architecture: Architecture, preset: str) -> None:
    report = check(architecture("mobilenet_v2"), preset=preset, device="stx")
    assert report.after.islands == 1
    assert report.after.cpu_nodes == 0
    assert report.before.npu_share is not None
    assert report.before.npu_share < 1
    assert report.after.npu_share == 1


def test_xint8_keeps_the_clip_of_a_depthwise_conv(architecture: Architecture) -> None:
    report = check(architecture("mobilenet_v2"), preset="xint8", device="stx")
    found = [f for f in report.findings if f.rule == "P08"]
    assert len(found) == 18
    assert all(f.automatic for f in found)


def test_first_generation_has_other_rules(architecture: Architecture) -> None:
    report = check(architecture("mobilenet_v2"), preset="xint8", device="phx")
    assert report.before.islands == 1
    assert check(architecture("efficientnet_b0"), preset="xint8", device="phx").before.islands == 1


def test_format_that_the_device_lacks_leaves_all_on_the_cpu(architecture: Architecture) -> None:
    before = check(architecture("resnet18"), preset="a8w8", device="phx").before
    assert before.islands == before.npu_nodes == 0
    assert {node.rule for node in before.nodes} == {"P19"}


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "preset", "cpu", "islands", "after"),
    [
        ("mobilenet_v2", "xint8", 36, 18, 1),
        ("mobilenet_v2", "a8w8", 36, 18, 1),
        ("mobilenet_v2", "a16w8", 0, 1, 1),
        ("mobilenet_v3_small", "xint8", 62 - 28, 32, 32),  # 28 HardSigmoid, whose Mul the log counts
        ("mobilenet_v3_small", "a8w8", 0, 1, 1),
        ("mobilenet_v3_small", "a16w8", 0, 1, 1),
        ("cifar10_resnet20", "xint8", 0, 1, 1),
    ],
)
def test_real_models(name: str, preset: str, cpu: int, islands: int, after: int) -> None:
    path = _SHARED / f"{name}.onnx"
    if not path.exists():
        pytest.skip(f"{path} is absent")
    report = check(path, preset=preset, device="stx")
    assert (report.before.cpu_nodes, report.before.islands, report.after.islands) == (cpu, islands, after)


def test_macs(make: type) -> None:
    net = make()  # 8 channels, 16 x 16
    net.conv(kernel=3)
    net.depthwise()
    net.classifier()
    macs = {node.op: node.macs for node in check(net.proto(), preset="a8w8").before.nodes}
    assert macs["Gemm"] == 8 * 4
    assert macs["Conv"] == 256 * 8 * 9
    assert macs["Flatten"] == 0
    first = check(net.proto(), preset="a8w8").before.nodes[0]
    assert first.macs == 256 * 8 * 8 * 9


def test_open_batch_counts_as_one(make: type) -> None:
    fixed, opened = make(), make(("N", 8, 16, 16))
    for net in (fixed, opened):
        net.conv()
        net.conv()
    left, right = (check(net.proto(), preset="a8w8").before.macs for net in (fixed, opened))
    assert left == right == 2 * 256 * 64


def test_every_node_has_a_place_and_a_reason(architecture: Architecture) -> None:
    for node in check(architecture("mobilenet_v2"), preset="xint8").before.nodes:
        assert (node.place is Place.CPU) == (node.rule is not None) == bool(node.reason)
        assert (node.island is None) == (node.place is Place.CPU)
