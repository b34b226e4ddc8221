"""The result of a conversion for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from roundel.report.console import decibel, size


def show_conversion(console: Console, tree: Mapping[str, Any]) -> None:
    """File, counts, closeness and notes."""
    table = Table(show_header=False, box=None, padding=(0, 1))
    file, counts = tree["file"], tree["converted"]
    table.add_row("result", f"{escape(file['name'])} ({size(file['bytes'])})")
    table.add_row("converted", f"{counts['activations']} activations, {counts['constants']} constants")
    console.print(table)
    if tree["outputs"]:
        console.print(_outputs(tree["outputs"]))
    for note in tree["notes"]:
        console.print(f"[yellow]note:[/] {escape(note)}", highlight=False)


def _outputs(reports: list[Mapping[str, Any]]) -> Table:
    table = Table(title="against the model given", title_justify="left", box=None)
    for heading in ("output", "SQNR", "cosine", "worst error", "same top-1"):
        table.add_column(heading, justify="left" if heading == "output" else "right", overflow="fold")
    for out in reports:
        top = "-" if out["same_top"] is None else f"{out['same_top']:.1%}"
        numbers = (decibel(out["sqnr_db"]), f"{out['cosine']:.5f}", f"{out['worst']:.3g}", top)
        table.add_row(escape(out["name"]), *numbers)
    return table
