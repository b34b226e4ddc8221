"""Tables of the kit and of the placement for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from roundel.kit.kit import DeployKit
from roundel.kit.placement import ComparisonRow, PlacementComparison, PlacementReport, places, verdicts


def show_kit(console: Console, kit: DeployKit) -> None:
    """What was written, and what to do next."""
    table = Table(show_header=False, box=None, padding=(0, 1))
    table.add_row("folder", Text(str(kit.folder)))
    table.add_row("format", Text(f"{kit.format.name} ({kit.reason})"))
    table.add_row("device", kit.device)
    table.add_row("files", Text(", ".join(kit.files)))
    table.add_row("options", Text(", ".join(f"{key}={value}" for key, value in kit.options.items())))
    console.print(table)
    for note in kit.notes:
        console.print(Text.assemble(("note: ", "yellow"), note))
    console.print(Text(f"next: python {kit.folder / 'run.py'} --random --report"))


def show_placement(
    console: Console, report: PlacementReport, model_ops: Mapping[str, int] | None = None
) -> None:
    """The placement as a table, then what it means."""
    table = Table(box=None, padding=(0, 1))
    for heading in ("device", "operators", "subgraphs", "types"):
        table.add_column(heading, justify="right" if heading in ("operators", "subgraphs") else "left")
    for name in dict.fromkeys([*report.operators, *report.subgraphs]):
        count, islands = report.operators.get(name), report.subgraphs.get(name)
        types = ", ".join(report.op_types.get(name, ()))
        table.add_row(name, _number(count), _number(islands), Text(types or "-"))
    console.print(table)
    if model_ops is not None:
        console.print(_model_table(report, model_ops))
    for sentence in verdicts(report):
        console.print(Text(sentence))
    for note in report.notes:
        console.print(Text.assemble(("note: ", "yellow"), note))


def show_placement_comparison(console: Console, rows: Sequence[ComparisonRow]) -> None:
    """Prediction beside reality."""
    table = Table(box=None, padding=(0, 1))
    for heading in ("", "predicted", "reported", "difference"):
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        difference = "-" if row.difference is None else f"{row.difference:+d}" if row.difference else "same"
        table.add_row(row.quantity, str(row.predicted), _number(row.actual), difference)
    console.print(table)


def show_prediction(console: Console, comparison: PlacementComparison) -> None:
    """The comparison with `roundel check`, and what to beware of."""
    console.print(Text(f"Predicted for {comparison.format} on {comparison.device}:"))
    show_placement_comparison(console, comparison.rows)
    for note in comparison.notes:
        console.print(Text.assemble(("note: ", "yellow"), note))


def _model_table(report: PlacementReport, model_ops: Mapping[str, int]) -> Table:
    table = Table(box=None, padding=(0, 1))
    for heading in ("operator", "nodes in the model", "ran on"):
        table.add_column(heading, justify="right" if heading.startswith("nodes") else "left")
    for op, count in model_ops.items():
        table.add_row(Text(op), str(count), places(report, op))
    return table


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
