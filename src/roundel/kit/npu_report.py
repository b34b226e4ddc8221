"""What the provider says about placement: its report file or a console log, read into one view."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from roundel.errors import RecipeError
from roundel.kit import vaiml
from roundel.kit.placement import (
    CPU_DEVICES,
    PlacementComparison,
    PlacementReport,
    ReportError,
    compare_with_check,
    model_operators,
    places,
    verdicts,
)
from roundel.kit.texts import text_of
from roundel.plain import Card, to_plain
from roundel.report.console import grid, show_notes

_COLOUR = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
_HEAD = re.compile(r"No\. of (Operators|Subgraphs)\s*:", re.IGNORECASE)
_RUNNING_LINE = re.compile(r"Actually running on\s+\w+\s+([0-9]{1,9})\b", re.IGNORECASE)
_ITEM = re.compile(r"\b([A-Z][A-Z0-9_]*)\s+([0-9]{1,9})(?![\w.%])")
_PERCENT = re.compile(r"\d+(?:\.\d+)?%")
# What loggers put before a line: [name], a date, or a source line such as 'I20250108 … stat.cpp:198]'.
_PREFIX = re.compile(r"^\s*(?:\[[^\]]*\]\s*|\d{4}-\d\d-\d\d[T ][\d:.,]+Z?\s*|\S[^\]]*\.\w+:\d+\]\s*)*")


@dataclass(slots=True)
class _Found:
    """One report as it comes together."""

    operators: dict[str, int] = field(default_factory=dict)
    subgraphs: dict[str, int] = field(default_factory=dict)
    running: int | None = None

    @property
    def complete(self) -> bool:
        """Whether the provider was done: it prints no subgraphs when all is on the CPU."""
        on_cpu = set(self.operators) <= CPU_DEVICES
        return bool(self.operators) and (on_cpu or bool(self.subgraphs) or self.running is not None)


def parse_log(text: str) -> PlacementReport | None:
    """The last complete report of a log, or None when there is none."""
    found = [each for each in _collect(_lines(text)) if each.operators]
    if not found:
        return None
    whole = [each for each in found if each.complete]
    chosen = (whole or found)[-1]
    notes = []
    if len(found) > 1:
        notes.append(f"the log holds {len(found)} reports; this is number {found.index(chosen) + 1}")
    if not whole:
        notes.append("the log has no line about subgraphs; it may have been cut short")
    return PlacementReport(
        "console log", chosen.operators, {}, chosen.subgraphs, chosen.running, tuple(notes)
    )


def _lines(text: str) -> list[str]:
    plain = _COLOUR.sub("", text).replace("\0", "")
    # Each heading begins a line: loggers without buffering lose the line ends between two of them.
    return re.split(r"\r\n|\r|\n", _HEAD.sub(lambda head: f"\n{head[0]}", plain))


def _collect(lines: list[str]) -> list[_Found]:
    found: list[_Found] = []
    section: str | None = None
    for line in lines:
        head = _HEAD.search(line)
        if head is not None:
            section = head[1].lower()
            if section == "operators" or not found:
                found.append(_Found())
            counts = line[head.end() :]
            _take(found[-1], section, counts)
            if counts.strip():
                section = None  # counts on the line itself: no more of them follow
        elif section is not None:
            rest = _PREFIX.sub("", line, count=1)
            if not _only_counts(rest):
                section = None
            else:
                _take(found[-1], section, rest)
    return found


def _take(found: _Found, section: str, text: str) -> None:
    running = _RUNNING_LINE.search(text)
    if running is not None:
        found.running = int(running[1])
        text = _RUNNING_LINE.sub(" ", text)
    counts = found.operators if section == "operators" else found.subgraphs
    for name, count in _ITEM.findall(text):
        counts[name] = int(count)


def _only_counts(text: str) -> bool:
    """Whether a line holds device counts and nothing else; an empty one does too."""
    return not _PERCENT.sub(" ", _ITEM.sub(" ", _RUNNING_LINE.sub(" ", text))).strip()


@dataclass(frozen=True, slots=True, repr=False)
class NpuReport(Card):
    """What ran where, beside the model that ran and what was predicted for it.

    Attributes:
        placement: what the provider says; None where there is only the compiler's own account.
        operators: how many nodes of each operator the model has; None without a model.
        comparison: with what `roundel.check` predicts; None without a model.
        compilation: what VAIML, the compiler for BF16 and mixed models, says; None where it said nothing.
    """

    placement: PlacementReport | None
    operators: Mapping[str, int] | None = None
    comparison: PlacementComparison | None = None
    compilation: vaiml.Compilation | None = None

    def card(self) -> Mapping[str, object]:
        """How much is on the NPU."""
        if self.placement is not None:
            return self.placement.card()
        found = self.compilation or vaiml.Compilation()
        return {
            "source": "the compiler's files",
            "NPU": "unknown" if found.share is None else f"{found.share:.1%} of the operators",
            "partitions": found.partitions,
            "messages": len(found.told),
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        tree = {} if self.placement is None else self.placement.to_dict()
        if self.compilation is not None:
            sentences = list(self.compilation.verdicts())
            tree["compilation"] = {**to_plain(self.compilation), "verdicts": sentences}
        if self.operators is not None and self.placement is not None:
            nodes = self.operators.items()
            tree["model"] = {op: {"nodes": n, "ran_on": places(self.placement, op)} for op, n in nodes}
        if self.comparison is not None:
            tree["comparison"] = self.comparison.to_dict()
        return tree


def npu_report(
    file: str | Path,
    *,
    model: str | Path | None = None,
    preset: str | None = None,
    device: str | None = None,
) -> NpuReport:
    """Show which operators ran on the NPU and which on the CPU, and what was predicted.

    Args:
        file: `vitisai_ep_report.json`, a text log that holds the lines of the provider or its compiler, one
            of the files that the compiler keeps, or the cache folder that they all lie in.
        model: the model that ran: shows where each operator type went, and what was predicted.
        preset: its format; else what it shows, or bf16 for a float model.
        device: where it ran; stx when not given.

    Raises:
        RoundelError: the file is no report, or the model cannot be read.
    """
    if model is None:
        if preset is not None or device is not None:
            raise RecipeError(
                "There is no model to predict the placement of.",
                where="--device" if preset is None else "--preset",
                expected="--model MODEL beside it",
                hint="Name the model that ran, for example --model kit/model.onnx.",
            )
        report, compilation = read_run(file)
        return NpuReport(report, compilation=compilation)
    (report, compilation), path = read_run(file), Path(model)
    compared = compare_with_check(
        report, path, preset=preset, device=device or "stx", compilation=compilation
    )
    return NpuReport(report, model_operators(path), compared, compilation)


def read_run(path: str | Path) -> tuple[PlacementReport | None, vaiml.Compilation | None]:
    """All that a file, or a cache folder, says about placement: the provider's part and the compiler's.

    Raises:
        ReportError: it says neither.
    """
    place = Path(path)
    if place.is_dir():
        return _read_folder(place)
    compilation = vaiml.compilation_of([(place.name, text_of(place))])
    if compilation is None:
        return read_report(place), None
    try:
        return read_report(place), compilation
    except ReportError:
        return None, compilation


def _read_folder(folder: Path) -> tuple[PlacementReport | None, vaiml.Compilation | None]:
    texts = [(path.name, text_of(path)) for path in vaiml.known_files(folder)]
    reports = sorted(folder.rglob("vitisai_ep_report.json"), key=lambda path: path.stat().st_mtime)
    compilation = vaiml.compilation_of(texts)
    if not reports and compilation is None:
        raise ReportError(
            "The folder holds nothing that the provider or its compiler writes.",
            where=folder,
            expected=", ".join(("vitisai_ep_report.json", *vaiml.REASON_FILES, *vaiml.SUMMARIES)),
            hint="Set enable_cache_file_io_in_mem to 0 (run.py --report does); for VAIML keep_outputs: true.",
        )
    return read_report(reports[-1]) if reports else None, compilation


_ALL = "ALL"
_RUNNING = "ACTUALLY RUNNING ON "


def read_report(path: str | Path) -> PlacementReport:
    """Read `vitisai_ep_report.json`, or a text log that holds the provider's console lines.

    Raises:
        ReportError: the file cannot be read, or is neither.
    """
    file = Path(path)
    text = text_of(file)
    if not text.strip():
        raise ReportError("The report is empty.", where=file, hint="Run the session with the report enabled.")
    looks_json = text.lstrip().startswith("{")
    if file.suffix.lower() == ".json" or looks_json:
        try:
            tree = json.loads(text)
        except (ValueError, RecursionError) as error:
            found = parse_log(text)
            if found is not None:
                return found
            raise ReportError(
                "The report is not valid JSON.",
                where=file,
                observed=error if isinstance(error, ValueError) else "nested too deeply",
                hint="Was the session still writing, or the file cut short? Run it again.",
            ) from error
        return parse_json(tree, file)
    found = parse_log(text)
    if found is None:
        raise ReportError(
            "The log has no placement line of the VitisAI provider.",
            where=file,
            expected="a line such as '[Vitis AI EP] No. of Operators : CPU 2 NPU 398'",
            hint="The provider prints it when it compiles: delete the cache folder, run again, and keep "
            "both stdout and stderr. No line at all can mean that the provider was not loaded.",
        )
    return found


def parse_json(tree: Any, where: object = "the report") -> PlacementReport:
    """The view of a parsed `vitisai_ep_report.json`; keys that it does not know are ignored.

    Raises:
        ReportError: it has no device statistics, or these are not counts.
    """
    stats = tree.get("deviceStat") if isinstance(tree, dict) else None
    if not isinstance(stats, list) or not stats:
        raise ReportError(
            "The report has no device statistics.",
            where=where,
            observed=f"keys {sorted(map(str, tree))[:8]}" if isinstance(tree, dict) else type(tree).__name__,
            expected="a list 'deviceStat'",
            hint="Is this vitisai_ep_report.json?",
        )
    operators: dict[str, int] = {}
    op_types: dict[str, tuple[str, ...]] = {}
    for entry, name, count in _entries(stats, ("name",), ("nodeNum",), where):
        operators[name] = operators.get(name, 0) + count
        types = entry.get("supportedOpType")
        if isinstance(types, list) and name != _ALL:
            # '::Conv' is Conv; 'com.microsoft::QuantizeLinear' keeps its domain.
            op_types[name] = tuple(dict.fromkeys(str(each).strip().strip(":") for each in types))
    total = operators.pop(_ALL, None)
    if not operators and total:
        raise ReportError("The report names no device but 'all'.", where=where, hint="Run the session again.")
    subgraphs: dict[str, int] = {}
    running: int | None = None
    parts = tree.get("subgraphStat")
    for _, name, count in _entries(parts, ("device", "name"), ("count", "subgraphNum"), where):
        if name.startswith(_RUNNING):
            running = (running or 0) + count
        elif name != _ALL:
            subgraphs[name] = subgraphs.get(name, 0) + count
    placed = sum(operators.values())
    notes = () if total in (None, placed) else (f"the report counts {total} operators, {placed} are placed",)
    return PlacementReport("vitisai_ep_report.json", operators, op_types, subgraphs, running, notes)


def _entries(
    stats: Any, names: tuple[str, ...], counts: tuple[str, ...], where: object
) -> Iterator[tuple[dict[str, Any], str, int]]:
    """Each entry with its device and its count, which stand under one of the keys."""
    for entry in stats if isinstance(stats, list) else ():
        known = entry if isinstance(entry, dict) else {}
        name = next((known[key] for key in names if known.get(key)), None)
        if not isinstance(name, str):
            raise ReportError(
                "An entry of the report names no device.",
                where=where,
                observed=str(entry)[:80],
                expected="a name",
            )
        # The file is protobuf's JSON: zeros are left out, and long integers are strings.
        value = next((known[key] for key in counts if key in known), 0)
        if isinstance(value, str) and re.fullmatch("[0-9]{1,18}", value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ReportError(
                "A count in the report is not a number.",
                where=where,
                observed=f"{counts[0]}: {str(value)[:40]}",
                expected="a whole number",
            )
        yield known, name.strip().upper(), value


def show_report(console: Console, report: NpuReport) -> None:
    """The placement as a table, what it means, and what was predicted."""
    if report.placement is not None:
        _show_placement(console, report.placement, report.operators)
    if report.compilation is not None:
        vaiml.show_compilation(console, report.compilation)
    if report.comparison is not None:
        _show_prediction(console, report.comparison)


def _show_placement(console: Console, placed: PlacementReport, model_ops: Mapping[str, int] | None) -> None:
    table = grid("device", ">operators", ">subgraphs", "~types")
    for name in dict.fromkeys([*placed.operators, *placed.subgraphs]):
        counts = (_or_dash(placed.operators.get(name)), _or_dash(placed.subgraphs.get(name)))
        table.add_row(name, *counts, Text(", ".join(placed.op_types.get(name, ())) or "-"))
    console.print(table)
    if model_ops is not None:
        table = grid("operator", ">nodes in the model", "ran on")
        for op, count in model_ops.items():
            table.add_row(Text(op), str(count), places(placed, op))
        console.print(table)
    for sentence in verdicts(placed):
        console.print(Text(sentence))
    show_notes(console, placed.notes)


def _show_prediction(console: Console, comparison: PlacementComparison) -> None:
    """Prediction beside reality."""
    console.print(Text(f"Predicted for {comparison.format} on {comparison.device}:"))
    table = grid("", ">predicted", ">reported", ">difference")
    for row in comparison.rows:
        difference = "-" if row.difference is None else f"{row.difference:+d}" if row.difference else "same"
        table.add_row(row.quantity, str(row.predicted), _or_dash(row.actual), difference)
    console.print(table)
    show_notes(console, comparison.notes)


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
