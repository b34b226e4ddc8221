"""Where each operator type of a model went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roundel.errors import RoundelError
from roundel.kit.vaiml import Compilation
from roundel.model import load_model
from roundel.model.graph import op_key
from roundel.plain import Card, counted, to_plain
from roundel.qdq.nodes import QUARK
from roundel.rules import CheckReport, check
from roundel.rules.formats import is_quantized
from roundel.rules.types import NodeCounts
from roundel.targets.npu import Format
from roundel.targets.vaiml import SAID_RULES

BOUNDARY_CPU = "VITIS_EP_CPU"
CPU_DEVICES = frozenset({"CPU", BOUNDARY_CPU})
_BOUNDARY_OPS = frozenset({"QuantizeLinear", "DequantizeLinear", "Cast"})
_MANY_ISLANDS = 5

# From AMD's documents and the threads of users who met it.
NOT_USED_CAUSES = (
    "an integer model with fewer than 2 Conv nodes, which the compiler leaves alone",
    "an operator or a post-processing tail that makes the compiler refuse the whole graph "
    "(cut or exclude the detection head first)",
    "a fixed batch above 1, open dimensions besides the batch, or Loop, If or Scan",
    "wrong provider options: target, xclbin (PHX and HPT only), a missing config_file for BF16, "
    "or the old spellings cacheDir and cacheKey",
    "a format that the device does not take (BF16 on PHX and HPT), or a stale cache folder",
)


class ReportError(RoundelError):
    """The provider's report or log cannot be read."""

    exit_code = 4


@dataclass(frozen=True, slots=True, repr=False)
class PlacementReport(Card):
    """What ran where.

    Attributes:
        source: the kind of file that said so.
        operators: number of operators for each device, by the provider's own names.
        op_types: operator types for each device, where the file has them.
        subgraphs: number of subgraphs for each device; empty where the file does not say.
        actually_running: how many of the NPU's subgraphs it says really run there, or None.
        notes: doubts about the file itself.
    """

    source: str
    operators: Mapping[str, int]
    op_types: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    subgraphs: Mapping[str, int] = field(default_factory=dict)
    actually_running: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def npu_ops(self) -> int:
        """Operators on the NPU, whatever the provider calls it (NPU, IPU, DPU, VAIML)."""
        return sum(count for name, count in self.operators.items() if name not in CPU_DEVICES)

    @property
    def cpu_ops(self) -> int:
        """All operators on the CPU, those at the borders of the islands included."""
        return sum(count for name, count in self.operators.items() if name in CPU_DEVICES)

    @property
    def boundary_ops(self) -> int:
        """Q/DQ and casts at the islands' borders, on the CPU (VITIS_EP_CPU; in older versions CPU)."""
        types = self.op_types.get("CPU", ())
        plain = self.operators.get("CPU", 0) if types and all(map(_is_boundary, types)) else 0
        return self.operators.get(BOUNDARY_CPU, 0) + plain

    @property
    def share(self) -> float:
        """Part of all operators that is on the NPU."""
        whole = self.npu_ops + self.cpu_ops
        return self.npu_ops / whole if whole else 0.0

    @property
    def islands(self) -> int | None:
        """Subgraphs on the NPU; 0 when nothing is there, None when the file does not say."""
        if self.npu_ops == 0:
            return 0
        counts = [count for name, count in self.subgraphs.items() if name not in CPU_DEVICES]
        return sum(counts) if counts else self.actually_running

    def card(self) -> Mapping[str, object]:
        """How much is on the NPU."""
        return {
            "source": self.source,
            "NPU": f"{counted(self.npu_ops, 'operator')} ({self.share:.1%}), islands: {self.islands}",
            "CPU": f"{counted(self.cpu_ops, 'operator')}, {self.boundary_ops} of them at borders",
            "notes": len(self.notes),
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, the verdicts included."""
        return {
            **to_plain(self),
            "npu_ops": self.npu_ops,
            "cpu_ops": self.cpu_ops,
            "boundary_ops": self.boundary_ops,
            "npu_share": self.share,
            "islands": self.islands,
            "verdicts": list(verdicts(self)),
        }


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One quantity, as predicted and as reported; `actual` is None where the file does not say."""

    quantity: str
    predicted: int
    actual: int | None

    @property
    def difference(self) -> int | None:
        """Reported minus predicted."""
        return None if self.actual is None else self.actual - self.predicted


def compare_placements(
    report: PlacementReport, predicted_cpu_ops: int, predicted_npu_ops: int | None, predicted_islands: int
) -> tuple[ComparisonRow, ...]:
    """Prediction beside reality.

    Args:
        report: what the provider said.
        predicted_cpu_ops: operators expected on the CPU, without the Q/DQ at the islands' borders.
        predicted_npu_ops: operators expected on the NPU, Q/DQ included; None leaves that row out.
        predicted_islands: NPU subgraphs expected.
    """
    on_npu = "operators on the NPU"
    first = () if predicted_npu_ops is None else (ComparisonRow(on_npu, predicted_npu_ops, report.npu_ops),)
    return (
        *first,
        ComparisonRow("operators on the CPU", predicted_cpu_ops, report.cpu_ops - report.boundary_ops),
        ComparisonRow("islands on the NPU", predicted_islands, report.islands),
    )


def verdicts(report: PlacementReport) -> tuple[str, ...]:
    """What the numbers mean, in sentences."""
    whole = report.npu_ops + report.cpu_ops
    if report.npu_ops == 0:
        unused = f"All {whole} operators are on the CPU: the NPU is not used at all."
        return unused, f"Likely causes: {'; '.join(NOT_USED_CAUSES)}."
    return tuple(_partial_verdicts(report, whole))


def _partial_verdicts(report: PlacementReport, whole: int) -> Iterator[str]:
    count = report.islands
    place = "" if count is None else f" in {counted(count, 'island')}"
    yield f"{report.share:.1%} of the operators ({report.npu_ops} of {whole}) are on the NPU{place}."
    running = report.actually_running
    if running is not None and count is not None and running < count:
        yield f"Only {running} of {count} NPU subgraphs really run on the NPU; the others run on the CPU."
    compute = report.cpu_ops - report.boundary_ops
    if compute == 0:
        yield "Only Q/DQ or casts at the borders are left on the CPU: as good as it gets."
        return
    types = sorted(name for name in report.op_types.get("CPU", ()) if not _is_boundary(name))
    named = f" ({', '.join(types)})" if types else ""
    yield f"{compute} operators run on the CPU{named}."
    if count is not None and count >= _MANY_ISLANDS:
        yield f"Tensors cross between CPU and NPU around {count} islands: each crossing costs time."


def _is_boundary(name: str) -> bool:
    return name.rpartition("::")[2] in _BOUNDARY_OPS


def model_operators(path: Path) -> dict[str, int]:
    """How many nodes of each operator a model has, most frequent first."""
    graph = load_model(path, allow_quantized=True, opaque=QUARK).model.graph
    return dict(Counter(op_key(node) for node in graph).most_common())


def places(report: PlacementReport, op: str) -> str:
    """'NPU', 'CPU', 'both' or '-' (not named) for an operator type."""
    on_cpu = {name in CPU_DEVICES for name, types in report.op_types.items() if op in types}
    if len(on_cpu) == 2:
        return "both"
    return "-" if not on_cpu else "CPU" if True in on_cpu else "NPU"


@dataclass(frozen=True, slots=True)
class PlacementComparison:
    """A prediction and a report of the same model.

    Attributes:
        format: the number format judged.
        device: the device judged.
        rows: the quantities that can be compared.
        notes: what the prediction rests on, and what to beware of.
    """

    format: str
    device: str
    rows: tuple[ComparisonRow, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        rows = [
            {"quantity": row.quantity, "predicted": row.predicted, "reported": row.actual}
            for row in self.rows
        ]
        return {**to_plain(self), "rows": rows}


def compare_with_check(
    report: PlacementReport | None,
    model: Path,
    *,
    preset: str | None = None,
    device: str = "stx",
    compilation: Compilation | None = None,
) -> PlacementComparison:
    """Judge the model that ran, as it stands, and put the prediction beside the report.

    Args:
        report: what the provider said; None where only its compiler did.
        model: the model that ran; with a preset, the float model that it was made from will do.
        preset: the format; None means what a quantized model shows, and BF16 for a float one.
        device: phx, hpt, stx, stx-halo or krk.
        compilation: what VAIML said.

    Raises:
        RoundelError: the model cannot be read, or there is no such preset or device.
    """
    if preset is None and not is_quantized(load_model(model, allow_quantized=True, opaque=QUARK).model):
        preset = Format.BF16.value  # what the compiler makes of a float model
    judged = check(model, preset=preset, device=device)
    split, integer = judged.before, Format(judged.format).integer
    told, unforeseen = ((), ()) if compilation is None else _said(compilation, judged)
    if report is None:
        return PlacementComparison(judged.format, judged.device, told, (*judged.notes, *unforeseen))
    rows = compare_placements(report, split.cpu_nodes, None if integer else split.npu_nodes, split.islands)
    notes = (*judged.notes, *_notes(report, judged, integer), *unforeseen)
    if judged.counts is not None:
        rows, doubts = _counted(report, judged.counts, split.islands)
        return PlacementComparison(judged.format, judged.device, rows, (*judged.notes, *doubts))
    return PlacementComparison(judged.format, judged.device, (*rows, *told), notes)


def _said(compilation: Compilation, judged: CheckReport) -> tuple[tuple[ComparisonRow, ...], tuple[str, ...]]:
    """The compiler's messages beside the rules that foresee them."""
    rows = []
    if compilation.partitions is not None:
        rows.append(ComparisonRow("partitions", judged.before.islands, compilation.partitions))
    foreseeable = {rule for told in compilation.told if (rule := told.explanation.rule) is not None}
    titles = {found.rule: found.title for found in judged.findings}
    expected = Counter(found.rule for found in judged.findings if found.rule in SAID_RULES)
    for rule in sorted(foreseeable | set(expected)):
        said = sum(told.count for told in compilation.told if told.explanation.rule == rule)
        name = f"{rule} {titles[rule]}" if rule in titles else f"messages that {rule} foresees"
        rows.append(ComparisonRow(name, expected[rule], said if said or compilation.reasoned else None))
    rest = sum(told.count for told in compilation.told if told.explanation.rule is None)
    return tuple(rows), (f"{rest} messages are of kinds that no rule foresees.",) if rest else ()


_DROPPED = 1  # a Mul by 1 that ONNX Runtime takes out


def _counted(
    report: PlacementReport, counts: NodeCounts, islands: int
) -> tuple[tuple[ComparisonRow, ...], tuple[str, ...]]:
    """The rows where the whole report is predicted, and what it means when its total is another."""
    total = report.npu_ops + report.cpu_ops
    rows = (
        ComparisonRow("operators in all", counts.all, total),
        ComparisonRow("operators on the NPU", counts.npu, report.npu_ops),
        ComparisonRow("operators on the CPU", counts.cpu, report.cpu_ops - report.boundary_ops),
        ComparisonRow("Q/DQ at the borders", counts.edge, report.boundary_ops),
        ComparisonRow("islands on the NPU", islands, report.islands),
    )
    if counts.all - _DROPPED <= total <= counts.all:
        return rows, ()
    return rows, (
        f"The report counts {total} operators and this file makes {counts.all}: another file was compiled."
        " The provider's cache goes by name: delete its folder. config.onnxPath in its context.json names"
        " the file.",
    )


def _notes(report: PlacementReport, judged: CheckReport, integer: bool) -> Iterator[str]:
    if not integer:
        return
    yield "The provider counts Q/DQ among the NPU's operators, so their number is not compared."
    named = BOUNDARY_CPU in report.operators or "CPU" in report.op_types
    if report.operators.get("CPU") and not named:
        yield "The report does not tell Q/DQ at the islands' borders from other operators on the CPU."
    before, after = judged.before, judged.after
    if not judged.quantized and after != before:
        yield (
            "Predicted for the plain preset. If the model was made with quantize --device: "
            f"{after.cpu_nodes} operators on the CPU, {after.islands} islands."
        )
