"""What a verdict says of what is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from roundel.report.verdict import Known, verdict

NPU: dict[str, Any] = {
    "device": "stx",
    "islands": 1,
    "npu_nodes": 9,
    "cpu_nodes": 0,
    "npu_share_of_macs": 1.0,
    "cpu": {},
    "errors": [],
}
KNOWN = Known(
    float_model="m.onnx",
    model="out dir/q.onnx",
    outputs=[{"name": "y", "sqnr_db": 25.0, "same_top": None}],
    scores=(),
    samples=8,
    random=False,
    data="calib",
    npu=NPU,
    recipe={"name": "a8w8", "effort": "fast"},
)


def score(top1: float | None, margin: float | None = None, **metric: float) -> dict[str, Any]:
    return {"top1": top1, "agreement": None, "margin": margin, "metric": metric, "rows": 500}


@pytest.mark.parametrize(
    ("sqnr_db", "level", "command"),
    [
        (25.0, "good", "roundel deploy 'out dir/q.onnx' --device stx -o q-kit"),
        (15.0, "doubtful", "roundel sensitivity 'out dir/q.onnx'"),
        (9.0, "poor", "roundel sensitivity 'out dir/q.onnx'"),
    ],
)
def test_by_the_outputs(sqnr_db: float, level: str, command: str) -> None:
    outputs = [{"name": "y", "sqnr_db": sqnr_db, "same_top": None}]
    told = verdict(replace(KNOWN, outputs=outputs))
    assert (told.level, told.next) == (level, command)


@pytest.mark.parametrize(
    ("after", "level", "words"),
    [
        (score(0.758, 0.006), "good", "top-1 76.00% -> 75.80%, -0.20 ± 0.60 points (95 %) on 500 rows"),
        (score(0.70, 0.02), "poor", "-6.00 ± 2.00 points"),
        (score(0.74, 0.03), "doubtful", "-2.00 ± 3.00 points"),
        (score(0.76, 0.09), "doubtful", "+0.00 ± 9.00 points"),
    ],
)
def test_accuracy_counts_more_than_decibels(after: dict[str, Any], level: str, words: str) -> None:
    told = verdict(replace(KNOWN, scores=[score(0.76), after]))
    assert told.level == level
    assert words in told.accurate


def test_of_a_detector() -> None:
    told = verdict(replace(KNOWN, scores=[score(None, mAP=0.5), score(None, mAP=0.4, F1=0.8)]))
    assert told.level == "poor"
    assert told.accurate.startswith("mAP 50.00% -> 40.00%")
    unlabelled = verdict(replace(KNOWN, scores=[score(None), score(None, F1=0.995)]))
    assert unlabelled.accurate.startswith("F1 with float 100.00% -> 99.50%")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "yes, predicted for stx: all 9 nodes in 1 island"),
        (
            {"cpu_nodes": 1, "cpu": {"Softmax": 1}, "npu_share_of_macs": 0.99},
            "mostly, predicted for stx: 99.0%",
        ),
        ({"cpu_nodes": 9, "npu_nodes": 0}, "no, predicted for stx: all 9 nodes stay on the CPU"),
        ({"errors": ["1 Conv (P04)"]}, "no, predicted for stx: 1 Conv (P04)"),
        ({"refused": "it takes no mx4"}, "not foreseen: it takes no mx4"),
    ],
)
def test_the_npu_in_a_line(changes: dict[str, Any], words: str) -> None:
    assert verdict(replace(KNOWN, npu={**NPU, **changes})).npu.startswith(words)


def test_without_effort_that_comes_next() -> None:
    known = replace(KNOWN, outputs=[{"name": "y", "sqnr_db": 5.0, "same_top": None}])
    told = verdict(replace(known, recipe={"name": "a8w8", "effort": "none"}))
    assert told.next.endswith("--recipe 'out dir/q.json' --data calib --effort fast")
    assert " -o 'out dir/q.fast.onnx' " in told.next


def test_a_model_of_another_tool_has_no_record_to_read() -> None:
    known = replace(KNOWN, outputs=[{"name": "y", "sqnr_db": 5.0, "same_top": None}], recipe=None)
    assert verdict(known).next == "roundel sensitivity m.onnx --data calib"
