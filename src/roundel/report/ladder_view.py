"""A walk up the ladder, and a study, on the terminal, within 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from roundel.report.console import size

Tree = Mapping[str, Any]
Words = Callable[[float], str]

_COLOURS = {"chosen": "bold green", "meets": "green", "best": "bold yellow", "fails": "red"}


def show_ladder(console: Console, tree: Tree, metric: Words, drop: Words) -> None:
    """Print what `AutoResult.to_dict` holds.

    Args:
        console: where to.
        tree: the ladder.
        metric: a value of the metric for people.
        drop: a loss in the unit of the budget for people.
    """
    console.print(
        f"{escape(tree['metric'])}: {escape(tree['metric_words'])}; float {metric(tree['float'])};"
        f" judged on {escape(tree['judged_on'])}",
        highlight=False,
    )
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("rung", no_wrap=True)
    for heading in (tree["metric"][:12], "drop", "SQNR dB", "NPU", "size", "sec."):
        table.add_column(escape(heading), justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for step in tree["ladder"]:
        colour = _COLOURS.get(step["verdict"], "dim")
        table.add_row(*_cells(step, metric, drop), f"[{colour}]{step['verdict']}[/]")
    console.print(table)
    for step in tree["ladder"]:
        if step["reason"]:
            console.print(f"[dim]{escape(step['rung'])}:[/] {escape(step['reason'])}", highlight=False)
    _outcome(console, tree, metric, drop)
    for note in tree["notes"]:
        console.print(f"[yellow]note:[/] {escape(note)}", highlight=False)


def step_line(step: Tree, metric: Words, drop: Words) -> str:
    """One rung in a line, for those who watch."""
    if step["metric"] is None:
        return f"{step['rung']}: {step['verdict']}, {step['reason']}"
    lost = "as good as float" if step["drop"] <= 0 else f"drop {drop(step['drop'])}"
    return f"{step['rung']}: {metric(step['metric'])}, {lost}, {step['verdict']}, {step['seconds']:.0f} s"


def show_study(console: Console, tree: Tree) -> None:
    """Print what `SearchResult.to_dict` holds: the best trials and how to use the first."""
    console.print(
        f"{tree['finished']} of {tree['trials']} trials, {escape(tree['metric'])} on"
        f" {escape(tree['judged_on'])}; study {escape(tree['study'])}",
        highlight=False,
    )
    objectives: Sequence[str] = tree["objectives"]
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("trial", justify="right", no_wrap=True)
    for name in objectives:
        table.add_column(escape(name), justify="right", no_wrap=True)
    table.add_column("values", overflow="fold")
    for trial in tree["best"]:
        values = ", ".join(f"{key}={value}" for key, value in trial["parameters"].items())
        numbers = (f"{value:.5g}" for value in trial["values"])
        table.add_row(str(trial["number"]), *numbers, escape(values))
    console.print(table)
    for trial in tree["refused"][:3]:
        console.print(f"[dim]trial {trial['number']} refused:[/] {escape(trial['reason'])}", highlight=False)
    if tree["options"]:
        console.print("\n[bold]the best one again[/]")
        console.print("  " + tree["options"], markup=False, highlight=False, soft_wrap=True)


def _cells(step: Tree, metric: Words, drop: Words) -> list[str]:
    share, noise = step["npu_share"], step["sqnr_db"]
    return [
        escape(step["rung"]),
        "-" if step["metric"] is None else metric(step["metric"]),
        "-" if step["drop"] is None else drop(float(step["drop"])),
        "-" if noise is None else "exact" if noise == "inf" else f"{noise:.1f}",
        "-" if share is None else f"{share:.0%}",
        size(step["file_bytes"]),
        f"{step['seconds']:.0f}",
    ]


def _outcome(console: Console, tree: Tree, metric: Words, drop: Words) -> None:
    chosen = next(step for step in tree["ladder"] if step["rung"] == tree["chosen"])
    where = f" in {tree['file']}" if tree["file"] else ""
    if tree["met"]:
        text = f"[bold green]met:[/] {escape(chosen['title'])}{escape(where)} stays within {tree['max_drop']}"
        console.print(text, highlight=False)
        return
    console.print(
        f"[bold red]not met:[/] no rung stays within {tree['max_drop']}; the best, {escape(chosen['title'])}"
        f" ({metric(chosen['metric'])}, drop {drop(chosen['drop'])}), was handed over{escape(where)}",
        highlight=False,
    )
