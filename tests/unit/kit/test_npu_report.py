"""The provider's reports and console lines, in all their dialects."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from roundel.kit import NpuReport, PlacementReport, ReportError, compare_placements, read_report, verdicts
from roundel.kit.npu_report import parse_json, parse_log, show_report
from roundel.kit.placement import PlacementComparison, model_operators, places

IPU = (
    "[Vitis AI EP] No. of Operators :   CPU     2    IPU   398  99.50%\n"
    "[Vitis AI EP] No. of Subgraphs :   CPU     1    IPU     1 Actually running on IPU     1\n"
)
NPU = (
    "[Vitis AI EP] No. of Operators : CPU 36 NPU 239 VITIS_EP_CPU 74\n"
    "[Vitis AI EP] No. of Subgraphs : NPU 18 Actually running on NPU 18\n"
)
VAIML = (
    "[Vitis AI EP] No. of Operators :   CPU     5  VAIML   119 \n"
    "[Vitis AI EP] No. of Subgraphs : VAIML     1 \n"
)
DENSE = (
    "[Vitis AI EP] No. of Operators :   CPU   356    NPU    42 VITIS_EP_CPU  1307 \n"
    "[Vitis AI EP] No. of Subgraphs :   NPU    63 Actually running on NPU      5\n"
)
ALL_CPU = "[Vitis AI EP] No. of Operators :   CPU   713 VITIS_EP_CPU  1664 \n"
SPREAD = """\
I20250108 18:49:43.727761   875 stat.cpp:198] [Vitis AI EP] No. of Operators :
I20250108 18:49:43.727761   875 stat.cpp:198]  VAIML   124
I20250108 18:49:43.727761   875 stat.cpp:198]
I20250108 18:49:43.727761   875 stat.cpp:198] [Vitis AI EP] No. of Subgraphs :
I20250108 18:49:43.727761   875 stat.cpp:198]    NPU     1
I20250108 18:49:43.727761   875 stat.cpp:198] Actually running on NPU      1
Iterations 100
"""
FILTERED = """\
[Vitis AI EP] No. of Operators :
    NPU   398
    VITIS_EP_CPU     2
[Vitis AI EP] No. of Subgraphs :
    NPU     1
Test Passed
Images 7
"""
MLP = (
    "[Vitis AI EP] No. of Operators :   CPU   107 MATMULNBITS   195    MLP   640 \n"
    "[Vitis AI EP] No. of Subgraphs :MATMULNBITS    65    MLP    32 \n"
)


def report(text: str) -> PlacementReport:
    found = parse_log(text)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "operators", "subgraphs", "running"),
    [
        (IPU, {"CPU": 2, "IPU": 398}, {"CPU": 1, "IPU": 1}, 1),
        (NPU, {"CPU": 36, "NPU": 239, "VITIS_EP_CPU": 74}, {"NPU": 18}, 18),
        (VAIML, {"CPU": 5, "VAIML": 119}, {"VAIML": 1}, None),
        (DENSE, {"CPU": 356, "NPU": 42, "VITIS_EP_CPU": 1307}, {"NPU": 63}, 5),
        (ALL_CPU, {"CPU": 713, "VITIS_EP_CPU": 1664}, {}, None),
        (SPREAD, {"VAIML": 124}, {"NPU": 1}, 1),
        (FILTERED, {"NPU": 398, "VITIS_EP_CPU": 2}, {"NPU": 1}, None),
        (MLP, {"CPU": 107, "MATMULNBITS": 195, "MLP": 640}, {"MATMULNBITS": 65, "MLP": 32}, None),
    ],
)
def test_dialects(text: str, operators: dict, subgraphs: dict, running: int | None) -> None:
    found = report(text)
    assert found.operators == operators
    assert found.subgraphs == subgraphs
    assert found.actually_running == running
    assert found.notes == ()


@pytest.mark.parametrize(
    "dress",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.replace("[Vitis", "2025-12-25 15:21:24.923 [W:onnxruntime:] [Vitis"),
        lambda text: text.replace("[Vitis", "\x1b[1;32m[depth_node-1] [Vitis").replace("\n", "\x1b[0m\n"),
        lambda text: text.replace("NPU 239", "\x1b[31mNPU\x1b[0m 239"),
        lambda text: "loading 10%\rloading 99%\r" + text + "Image 0: label cat 3\n",
        lambda text: text.replace("Operators :", "Operators:").replace("No. of", "NO. OF"),
        lambda text: text.replace("\n", " "),
        lambda text: text.replace("\n", " (took 5 s, step 7)\n"),
    ],
)
def test_what_loggers_and_terminals_add(dress: object) -> None:
    assert report(dress(NPU)).operators == report(NPU).operators
    assert report(dress(NPU)).subgraphs == {"NPU": 18}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "cp1252"])
def test_encodings(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "session.log"
    path.write_bytes(("Modèle chargé\r\n" + NPU).encode(encoding))
    assert read_report(path).npu_ops == 239


def test_the_last_complete_report_counts() -> None:
    cut = "[Vitis AI EP] No. of Operators :   CPU     1    NPU    99\n"
    found = report(IPU + NPU + cut)
    assert found.npu_ops == 239
    assert "3 reports; this is number 2" in found.notes[0]
    assert report(IPU + NPU + "[Vitis AI EP] No. of Operators :").npu_ops == 239
    assert report(NPU + ALL_CPU).npu_ops == 0
    assert report(cut).npu_ops == 99
    assert "cut short" in report(cut).notes[0]


def test_lines_after_a_report_are_not_counts() -> None:
    assert report(NPU + "Epoch 7\nCPU 9\n").operators["CPU"] == 36


@given(st.text(max_size=80), st.lists(st.sampled_from([NPU, IPU, SPREAD, "\x1b]", "9" * 5000]), max_size=4))
def test_any_text_is_read_or_not_but_never_fails(noise: str, parts: list[str]) -> None:
    for text in (noise.join(parts), "No. of Operators : CPU " + noise + "9" * 5000):
        found = parse_log(text)
        assert found is None or all(count >= 0 for count in found.operators.values())


def test_numbers() -> None:
    found = report(NPU)
    assert (found.npu_ops, found.cpu_ops, found.boundary_ops, found.islands) == (239, 110, 74, 18)
    assert found.share == pytest.approx(239 / 349)
    assert json.loads(json.dumps(found.to_dict()))["islands"] == 18


def tree(npu: str = "NPU", **extra: object) -> dict:
    return {
        "deviceStat": [
            {"name": "all", "nodeNum": 400, "supportedOpType": ["::Conv", "::QuantizeLinear"]},
            {"name": "CPU", "nodeNum": 2, "supportedOpType": ["::DequantizeLinear", "::QuantizeLinear"]},
            {"name": npu, "nodeNum": 398, "supportedOpType": ["::Conv", "com.microsoft::QuantizeLinear"]},
        ],
        "somethingNew": {"deep": [1, 2]},
        **extra,
    }


@pytest.mark.parametrize("npu", ["NPU", "DPU", "IPU", "VAIML"])
def test_json(tmp_path: Path, npu: str) -> None:
    path = tmp_path / "vitisai_ep_report.json"
    path.write_text(json.dumps(tree(npu)))
    found = read_report(path)
    assert found.operators == {"CPU": 2, npu: 398}
    assert found.op_types[npu] == ("Conv", "com.microsoft::QuantizeLinear")
    assert found.boundary_ops == 2
    assert found.islands is None
    assert "as good as it gets" in " ".join(verdicts(found))


def test_json_subgraphs_and_protobuf_habits() -> None:
    stats = [
        {"device": "NPU", "count": "18"},
        {"device": "Actually running on NPU", "count": 5},
        {"name": "CPU"},
    ]
    found = parse_json(tree(subgraphStat=stats))
    assert found.subgraphs == {"NPU": 18, "CPU": 0}
    assert (found.islands, found.actually_running) == (18, 5)
    assert parse_json({"deviceStat": [{"name": "CPU"}, {"name": "NPU", "nodeNum": 4}]}).cpu_ops == 0


def test_json_that_does_not_add_up_is_noted() -> None:
    odd = tree()
    odd["deviceStat"][0]["nodeNum"] = 500
    assert "500" in parse_json(odd).notes[0]


def test_json_with_another_name_or_encoding(tmp_path: Path) -> None:
    path = tmp_path / "report.txt"
    path.write_bytes(json.dumps(tree()).encode("utf-16"))
    assert read_report(path).npu_ops == 398


def test_a_log_with_a_json_name(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    path.write_text(NPU)
    assert read_report(path).npu_ops == 239


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ('{"deviceStat": [', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "no device statistics"),
        ('{"other": 1}', "no device statistics"),
        ('{"deviceStat": []}', "no device statistics"),
        ('{"deviceStat": [3]}', "names no device"),
        ('{"deviceStat": [{"nodeNum": 3}]}', "names no device"),
        ('{"deviceStat": [{"name": "all", "nodeNum": 3}]}', "no device but"),
        ('{"deviceStat": [{"name": "CPU", "nodeNum": "many"}]}', "not a number"),
        ('{"deviceStat": [{"name": "CPU", "nodeNum": -1}]}', "not a number"),
        ('{"deviceStat": [{"name": "CPU", "nodeNum": "' + "9" * 5000 + '"}]}', "not a number"),
        ('{"deviceStat": [{"name": "CPU", "nodeNum": ' + "9" * 5000 + "}]}", "not valid JSON"),
        ('{"deviceStat": [{"name": "CPU", "nodeNum": true}]}', "not a number"),
        ('{"deviceStat": [{"name": "CPU", "nodeNum": 1}], "subgraphStat": [{}]}', "names no device"),
    ],
)
def test_broken_json(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "vitisai_ep_report.json"
    path.write_text(text)
    with pytest.raises(ReportError, match=message):
        read_report(path)


def test_broken_files(tmp_path: Path) -> None:
    path = tmp_path / "session.log"
    path.write_bytes(bytes(range(256)) * 8)
    with pytest.raises(ReportError, match="no placement line"):
        read_report(path)
    with pytest.raises(ReportError, match="cannot be read"):
        read_report(tmp_path / "missing.log")
    with pytest.raises(ReportError, match="cannot be read"):
        read_report(tmp_path)


def test_verdicts() -> None:
    unused = " ".join(verdicts(report(ALL_CPU)))
    assert "All 2377 operators are on the CPU: the NPU is not used at all." in unused
    assert "Likely causes" in unused
    assert "cacheDir" in unused
    split = " ".join(verdicts(report(NPU)))
    assert "68.5% of the operators (239 of 349) are on the NPU in 18 islands." in split
    assert "36 operators run on the CPU" in split
    assert "Only 5 of 63" in " ".join(verdicts(report(DENSE)))
    assert verdicts(report(SPREAD))[0] == "100.0% of the operators (124 of 124) are on the NPU in 1 island."


def test_comparison() -> None:
    rows = compare_placements(report(NPU), predicted_cpu_ops=36, predicted_npu_ops=240, predicted_islands=18)
    assert [(r.predicted, r.actual, r.difference) for r in rows] == [(240, 239, -1), (36, 36, 0), (18, 18, 0)]
    assert compare_placements(parse_json(tree()), 0, 398, 1)[2].difference is None


def test_tables_fit_eighty_columns(a8w8: Path) -> None:
    many = tree()
    many["deviceStat"][2]["supportedOpType"] = [f"::Operator{i}" for i in range(60)]
    console = Console(width=80, record=True, file=None, force_terminal=False, quiet=False)
    with console.capture() as captured:
        show_report(console, NpuReport(parse_json(many), model_operators(a8w8)))
        show_report(console, NpuReport(report(ALL_CPU)))
        rows = compare_placements(parse_json(tree()), 0, 398, 1)
        compared = PlacementComparison("a8w8", "stx", rows, ())
        show_report(console, NpuReport(parse_json(tree()), comparison=compared))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert any("VITIS_EP_CPU" in line for line in lines)


def test_where_each_operator_went(a8w8: Path) -> None:
    found = parse_json(tree())
    assert places(found, "Conv") == "NPU"
    assert places(found, "QuantizeLinear") == "CPU"
    assert places(found, "Gemm") == "-"
    assert model_operators(a8w8)["Conv"] >= 2
