"""A ranking of layers on the terminal, within 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from roundel.report.compare_view import shortened

Tree = Mapping[str, Any]

_WORST = 10
_NAME_WIDTH = 24
_OP_WIDTH = 9


def show_sensitivity(console: Console, tree: Tree, *, everything: bool) -> None:
    """Print what `Sensitivity.to_dict` holds; all layers, or the worst."""
    layers = tree["layers"]
    whole = "exact" if tree["sqnr_db"] is None else f"{tree['sqnr_db']:.1f} dB"
    console.print(
        f"{escape(tree['model'])}, {escape(tree['recipe'])}: {whole} after calibration; {len(layers)} layers,"
        f" each measured with {tree['samples']} samples, {tree['seconds']:.1f} s",
        highlight=False,
    )
    console.print(_table(layers if everything else layers[:_WORST]))
    _proposals(console, [layer for layer in layers if layer["remedies"]])
    if tree["together"] is not None:
        console.print("\n[bold]all first proposals at once[/]")
        _verbatim(console, tree["together"])
    if tree["head"] is not None:
        _head(console, tree["head"])
    for note in tree["notes"]:
        console.print(f"[yellow]note:[/] {escape(note)}", highlight=False)


def _table(layers: Sequence[Tree]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    for heading in ("\nlayer", "\nop"):
        table.add_column(heading, no_wrap=True)
    for heading in ("alone\ndB", "share\nof all", "left\nof it", "from\nweights", "won\nback"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("what\nhelps", no_wrap=True)
    for layer in layers:
        cost = layer["cost"]
        table.add_row(
            escape(shortened(layer["name"], _NAME_WIDTH)),
            escape(layer["op"][:_OP_WIDTH]),
            "exact" if layer["sqnr_db"] is None else f"{layer['sqnr_db']:.1f}",
            f"{layer['share']:.1%}",
            f"{layer['left']:.1%}",
            f"{layer['weights'] / cost:.0%}" if cost else "-",
            "-" if layer["won_back"] is None else f"{layer['won_back']:.0%}",
            layer["remedies"][0]["kind"] if layer["remedies"] else "-",
        )
    return table


def _proposals(console: Console, layers: Sequence[Tree]) -> None:
    for number, layer in enumerate(layers, 1):
        console.print(f"\n[bold]{number}. {escape(layer['name'])}[/]", highlight=False, soft_wrap=True)
        for remedy in layer["remedies"]:
            console.print(f"{remedy['kind']}: {escape(remedy['why'])}", highlight=False)
            _verbatim(console, remedy["option"])


def _head(console: Console, head: Tree) -> None:
    count, share = len(head["nodes"]), head["share"]
    console.print(f"\n[bold]detection head[/]: {count} nodes, {share:.0%} of all costs", highlight=False)
    for sign in head["signs"]:
        console.print(f"- {escape(sign)}", highlight=False)
    _verbatim(console, head["option"])


def _verbatim(console: Console, text: str) -> None:
    """Words to copy: a line of the terminal's own breaking stays one line in the clipboard."""
    console.print("  " + text, markup=False, highlight=False, soft_wrap=True)
