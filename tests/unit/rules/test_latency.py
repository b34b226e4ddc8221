"""The guess of a Phoenix NPU's time: published timings within the factor that is promised."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from roundel.report.views import show_check
from roundel.rules import check, latency
from roundel.rules.latency import guess


@pytest.mark.parametrize(
    ("network", "billions", "layers", "measured"),
    [
        ("RegNetX-002", 0.20, 45, 2.47),
        ("MobileNetV2", 0.30, 53, 2.68),
        ("ResNet50 at 224", 4.24, 54, 5.22),
        ("ResNeXt-50", 4.26, 54, 9.37),
        ("YOLOv8n at 640", 4.703, 63, 8.87),
        ("wide_resnet101_2", 23.2, 105, 17.90),
        ("YOLOv8m", 40.6, 83, 26.95),
        ("YOLOv8x", 131.1, 103, 117.11),
    ],
)
def test_published_timings_are_within_a_factor_of_two(
    network: str, billions: float, layers: int, measured: float
) -> None:
    for milliseconds in guess(round(billions * 1e9), layers):
        assert 0.5 < milliseconds / measured < 2, network


def _small(make: Any) -> Any:
    net = make()
    net.conv()
    net.conv()
    return net.classifier().proto()


def test_a_small_network_is_said_to_be_faster_on_the_cpu(make: Any, capsys: Any) -> None:
    report = check(_small(make), preset="xint8", device="phx")
    assert report.latency is not None
    found = report.latency
    assert found.least_ms < found.npu_ms < found.most_ms
    assert found.cpu_ms is not None
    assert found.cpu_ms < 1000
    assert "likely to be faster on the CPU" in found.notes[0]
    assert "formulas disagree" in found.notes[1], "three layers are too few for both to hold"
    show_check(Console(width=200), report.to_dict())
    text = capsys.readouterr().out
    assert "a rough guess" in text
    assert "in float," in text


def test_what_the_summary_promises(make: Any, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(latency, "guess", lambda *_: (5.0, 5.5))
    report = check(_small(make), preset="xint8", device="phx")
    show_check(Console(width=200), report.to_dict())
    assert "NPU about 5.2 ms (2.5 to 11.0: a guess within a factor of 2)" in capsys.readouterr().out


def test_no_guess_where_the_layers_stay_on_the_cpu(make: Any) -> None:
    """MatMul never ran there: the time of the few nodes around it is nobody's question."""
    net = make((1, 16, 32))
    net.add("MatMul", net.x, net.weight(32, 32))
    net.add("Relu")
    report = check(net.proto(), preset="xint8", device="phx")
    assert report.after.npu_share == 0.0
    assert report.latency is None


def test_hawk_point_alike_and_no_guess_for_others(make: Any) -> None:
    assert check(_small(make), preset="xint8", device="hpt").latency is not None
    assert check(_small(make), preset="xint8", device="stx").latency is None
    assert check(_small(make), preset="a8w8", device="phx").latency is None, "nothing is placed"


@pytest.mark.parametrize(
    ("cpu_ms", "words"), [(0.01, "is faster, even if"), (500.0, "is slower, even if"), (2.0, "measure both")]
)
def test_larger_networks_are_compared_with_this_machine(
    make: Any, monkeypatch: Any, cpu_ms: float, words: str
) -> None:
    monkeypatch.setattr(latency, "_SMALL_MACS", 0)
    monkeypatch.setattr(latency, "forward_seconds", lambda *_: cpu_ms / 1000)
    found = check(_small(make), preset="xint8", device="phx").latency
    assert found is not None
    assert words in found.notes[0]
