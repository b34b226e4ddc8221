"""Tables of the kit and of the placement for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from roundel.kit.kit import DeployKit
from roundel.kit.npu_report import NpuReport
from roundel.kit.placement import PlacementComparison, places, verdicts
from roundel.report.console import grid, labelled, show_notes


def show_kit(console: Console, kit: DeployKit) -> None:
    """What was written, and what to do next."""
    rows = {
        "folder": str(kit.folder),
        "format": f"{kit.format.name} ({kit.reason})",
        "device": kit.device,
        "files": ", ".join(kit.files),
        "options": ", ".join(f"{key}={value}" for key, value in kit.options.items()),
    }
    console.print(labelled(rows))
    show_notes(console, kit.notes)
    console.print(Text(f"next: python {kit.folder / 'run.py'} --random --report"))


def show_report(console: Console, report: NpuReport) -> None:
    """The placement as a table, what it means, and what was predicted."""
    placed, model_ops = report.placement, report.operators
    table = grid("device", ">operators", ">subgraphs", "~types")
    for name in dict.fromkeys([*placed.operators, *placed.subgraphs]):
        counts = (_number(placed.operators.get(name)), _number(placed.subgraphs.get(name)))
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
    if report.comparison is not None:
        _show_prediction(console, report.comparison)


def _show_prediction(console: Console, comparison: PlacementComparison) -> None:
    """Prediction beside reality."""
    console.print(Text(f"Predicted for {comparison.format} on {comparison.device}:"))
    table = grid("", ">predicted", ">reported", ">difference")
    for row in comparison.rows:
        difference = "-" if row.difference is None else f"{row.difference:+d}" if row.difference else "same"
        table.add_row(row.quantity, str(row.predicted), _number(row.actual), difference)
    console.print(table)
    show_notes(console, comparison.notes)


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
