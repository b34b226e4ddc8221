"""The VAIML compiler's own words: its log, its reasons, its summaries."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from typer.testing import CliRunner

import roundel
from roundel.cli.app import app
from roundel.kit import ReportError
from roundel.kit.npu_report import npu_report, show_report
from roundel.kit.vaiml import Compilation, compilation_of
from roundel.targets.vaiml import explain_message

LOG = """\
INFO: [VAIML-COMPILE 1000] Operation statistics for the model:
 Operations encountered:
-----------------------
  kernel:AddBf163D (bf16, bf16) -> (bf16)                             , 25
  kernel:Gemm (i8, i8, i16) -> (bf16)                                 , 12
  templatedGraph:MX9MHAs256d512m2048Adf (i8, f32, f32, ...) -> (bf16) , 12
INFO: [VAIML-COMPILE 1000] Operation statistics for CPU partitions:
  kernel:Nothing (bf16) -> (bf16) , 1
WARNING: [VAIML-FRONTEND 2018] Operation/s with NON-STATIC SHAPE have been detected in MODEL
INFO: [VAIML-COMPILE 1000] Partition completed with 2 partition
INFO: [VAIML-COMPILE 1046] 98.50% of operations will run on AIE, 1.50% of operations will run on CPU.
Partition 0 breaks at: CpuBecause("/m/T_DequantizeLinear") / CpuBecause("/m/S_DequantizeLinear")
"""
FAILED = """\
ERROR: [VAIML-BE-SKGEN 11005] Flexible L1 placement failure in layer 224 : Failed to place the buffers.
INFO: [VAIP-VAIML-PASS] Model compilation completed with errors.
INFO: [VAIP-VAIML-PASS] Failed to compile subgraph vaiml_par_1. It will fall back to CPU.
INFO: [VAIP-VAIML-PASS] Subgraph par_0 GOPs% (0.9%) is less than the threshold (2%). It will fall back to CPU.
=== Compilation Successful ===
"""
MLIR = """\
%1 = xten_nn.subgraph (%arg0 = %0: tensor<1x8xf32>) attributes {
  LayerName = "/m/Cast", Op = "Cast",
  Message = "Standalone tosa.cast is not supported [FE]", Operands = [{Name = "x"}], Reason = "CpuBecause"} {
^bb0:
}
%2 = xten_nn.subgraph (%1) attributes {LayerName = "/m/Conv", Reason = "InCoreChain"} {
^bb0:
}
%3 = xten_nn.subgraph (%2) attributes {
  LayerName = "/m/Odd", Message = "a \\"new\\" complaint", Op = "Odd", Reason = "CpuBecause"} {
^bb0:
}
"""


@pytest.mark.parametrize(
    ("message", "stage", "cause", "remedy", "rule"),
    [
        ("Standalone tosa.cast is not supported [FE]", "frontend", "lone float cast", "f32_to_bf16", None),
        (
            "Standalone dequantizeLinear is not supported [FE]",
            "frontend",
            "usual break",
            "power-of-two",
            "Q17",
        ),
        (
            "YAML constraints failed [MLLIB]: MulBf16: 'config.dtype' value float32 is incompatible",
            "kernel library",
            "not converted",
            "enable_f32_to_bf16_conversion",
            None,
        ),
        ("Dataformat Edge to Op can not be fixed", "compiler", "layouts", "preferred_data_storage", None),
        (
            "Reshape with start garbage cannot be merged into non-AIE consumer",
            "compiler",
            "feeds a node on the CPU",
            "Reshape",
            "P30",
        ),
        (
            "PseudoOp:Reshape only supports bf16, fp16, int8, and uint8",
            "compiler",
            "another type",
            "64-bit",
            "P30",
        ),
        ("Small tensor (threshold 100) in function edge", "compiler", "on purpose", "leave it", "P31"),
        ("onnx.Transpose in function edge", "compiler", "edge of a partition", "frontend flag", "P29"),
        ("Datatype Unsupported [FE]: tosa.select : i1", "frontend", "booleans", "none known", "P27"),
        (
            "Unsupported gather with constant data input and non-scalar indices [FE]",
            "frontend",
            "table",
            "host",
            "P28",
        ),
        ("User requested this layer to be partitioned out", "user's flags", "configuration", "flags", None),
        ("Unwrapping layer with ConvBf16", "tiling", "could not be placed", "chaining", None),
        ("no kernel fits [BE]", "backend", "no kernel", "enable-conv-to-im2col-and-gemm=1", None),
    ],
)
def test_messages_are_explained(message: str, stage: str, cause: str, remedy: str, rule: str | None) -> None:
    found = explain_message(message)
    assert found.stage == stage
    assert cause in found.cause
    assert remedy in found.remedy
    assert found.rule == rule


def test_of_an_unknown_message_nothing_is_guessed() -> None:
    found = explain_message("the moon is full")
    assert (found.stage, found.cause, found.remedy, found.rule) == ("unclassified", "", "", None)


def _read(**files: str) -> Compilation:
    found = compilation_of(files.items())
    assert found is not None
    return found


def test_the_log(tmp_path: Path) -> None:
    found = _read(log=LOG)
    assert (found.partitions, found.planned, found.supported) == (2, 0.985, None)
    assert [(k.kind, k.name, k.count, k.floating) for k in found.kernels] == [
        ("kernel", "AddBf163D", 25, False),
        ("kernel", "Gemm", 12, False),
        ("templatedGraph", "MX9MHAs256d512m2048Adf", 12, True),
    ]
    assert found.breaks == ("/m/T_DequantizeLinear", "/m/S_DequantizeLinear")
    assert [told.explanation.rule for told in found.told] == ["P02"]
    assert any("float32 is left in 1 kernels" in line for line in found.verdicts())


def test_a_success_that_is_none() -> None:
    """ONNX Runtime prints success; the partitions run on the CPU all the same."""
    found = _read(log=FAILED)
    assert found.failed
    assert any("no error reaches ONNX Runtime" in line for line in found.verdicts())
    causes = " ".join(told.explanation.cause for told in found.told)
    assert "do not fit into the memory" in causes
    assert "small part of the work" in causes


def test_the_plan_is_not_the_verdict() -> None:
    """The console's 100 % stood over a graph of which the compiler supported nothing."""
    plan = LOG.replace("98.50%", "100.00%").replace("with 2 partition", "with 1 partition")
    summary = "Number of operators supported by VAIML: 0(0.000%)\n"
    found = compilation_of([("x.log", plan), ("preliminary-vaiml-pass-summary.txt", summary)])
    assert found is not None
    assert found.share == 0.0
    assert any("that is a plan" in line for line in found.verdicts())
    assert not any("as good as it gets" in line for line in found.verdicts())


def test_reasons_from_the_graph() -> None:
    found = compilation_of([("m.chained_kernel.tosa.mlir", MLIR)])
    assert found is not None
    assert [(told.op, told.nodes) for told in found.told] == [("Cast", ("/m/Cast",)), ("Odd", ("/m/Odd",))]
    assert found.told[1].message == 'a "new" complaint'
    assert found.told[1].explanation.cause == ""


@pytest.mark.parametrize(
    "tree",
    [
        [{"node_name": "a", "op_type": "Gather", "reason": "odd [FE]"}],
        {"ops": [{"name": "a", "Op": "Gather", "Message": "odd [FE]"}]},
        {"unsupported_nodes": ["a"], "incompatible_map": {"a": ["odd [FE]"]}},
    ],
)
def test_reasons_in_json_however_spelt(tree: object) -> None:
    found = compilation_of([("aie_unsupported_original_ops_with_reasons.json", json.dumps(tree))])
    assert found is not None
    (told,) = found.told
    assert (told.message, told.nodes, told.explanation.stage) == ("odd [FE]", ("a",), "frontend")


@pytest.mark.parametrize(
    "text", ["", "{", "[1, null]", '{"name": 3, "reason": {"x": 1}}', '{"deviceStat": []}']
)
def test_other_json_is_no_reason(text: str) -> None:
    assert compilation_of([("other.json", text)]) is None


def _lookup() -> onnx.ModelProto:
    table = numpy_helper.from_array(np.ones((50, 128), np.float32), "table")
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"], name="words"),
        helper.make_node("Relu", ["rows"], ["y"], name="relu"),
    ]
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, [1, 4])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, 128])
    graph = helper.make_graph(nodes, "g", [ids], [out], [table])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def test_a_cache_folder_beside_the_prediction(tmp_path: Path) -> None:
    """Reasons, summary and log are found at any depth; rules and messages stand side by side."""
    deep = tmp_path / "cache" / "key" / "vaiml_partition_fe.flexml"
    deep.mkdir(parents=True)
    said = "Unsupported gather with constant data input and non-scalar indices [FE]"
    reasons = [{"node_name": "words", "op_type": "Gather", "reason": said}, {"name": "z", "reason": "odd"}]
    (deep / "aie_unsupported_original_ops_with_reasons.json").write_text(json.dumps(reasons))
    (tmp_path / "cache" / "key" / "preliminary-vaiml-pass-summary.txt").write_text(
        "Number of operators supported by VAIML: 1(50.000%)\nGOPs supported by VAIML: 0.1 (40.0%)\n"
    )
    (tmp_path / "compile.log").write_text(LOG)
    model = tmp_path / "m.onnx"
    onnx.save(_lookup(), model)
    report = npu_report(tmp_path, model=model)
    assert report.placement is None
    assert report.compilation is not None
    assert (report.compilation.supported, report.compilation.gops) == (0.5, 0.4)
    assert report.comparison is not None
    rows = {row.quantity: (row.predicted, row.actual) for row in report.comparison.rows}
    assert rows["P28 lookup in a table"] == (1, 1)
    assert rows["partitions"][1] == 2
    assert any("1 messages are of kinds" in note for note in report.comparison.notes)
    console = Console(width=200, record=True, file=io.StringIO())
    show_report(console, report)
    text = console.export_text()
    for words in (said, "look the table up on the host", "the compiler's own words", "P28 lookup in a table"):
        assert words in text
    done = CliRunner().invoke(app, ["npu-report", str(tmp_path), "--json"])
    assert json.loads(done.output)["compilation"]["supported"] == 0.5


def test_a_folder_without_anything(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="holds nothing"):
        npu_report(tmp_path)


def test_a_log_of_both_kinds(tmp_path: Path) -> None:
    log = tmp_path / "session.log"
    log.write_text(LOG + "[Vitis AI EP] No. of Operators :   CPU     5  VAIML   119 \n")
    report = roundel.npu_report(log)
    assert report.placement is not None
    assert report.placement.npu_ops == 119
    assert report.compilation is not None
