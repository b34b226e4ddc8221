"""A check on the terminal: the split, a strip of the graph, and the findings by rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

Tree = Mapping[str, Any]

_COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_BLOCKS = {"N": "█", "C": "░"}
_PLAIN_BLOCKS = {"N": "#", "C": "."}
_LINES = 3  # of the strip
_FIRST_NODES = 3
_MARGIN = 9


def show_check(console: Console, report: Tree) -> None:
    """Print what `CheckReport.to_dict` holds."""
    _summary(console, report)
    _strips(console, report)
    for note in report["notes"]:
        console.print(f"[dim]note: {escape(note)}[/]", highlight=False)
    if report["findings"]:
        console.print(_findings(report["findings"]))
    else:
        console.print("[green]no findings[/]")
    if "nodes" in report["after"]:
        console.print(_nodes(report["before"]["nodes"], report["after"]["nodes"]))


def _summary(console: Console, report: Tree) -> None:
    before, after = report["before"], report["after"]
    table = Table(show_header=False, box=None, padding=(0, 1))
    kind = "quantized" if report["quantized"] else "float"
    table.add_row("model", escape(f"{report['model']} ({kind}), {report['format']} on {report['device']}"))
    table.add_row("NPU islands", _change(str(before["islands"]), str(after["islands"])))
    table.add_row("MACs on the NPU", _change(_share(before), _share(after)))
    total = before["npu_nodes"] + before["cpu_nodes"]
    table.add_row(
        "nodes on the CPU", f"{_change(str(before['cpu_nodes']), str(after['cpu_nodes']))} of {total}"
    )
    console.print(table, highlight=False)


def _change(before: str, after: str) -> str:
    return before if before == after else f"{before} -> {after}"


def _share(split: Tree) -> str:
    share = split["npu_share_of_macs"]
    return "no layers" if share is None else f"{share:.1%}"


def _strips(console: Console, report: Tree) -> None:
    blocks = _BLOCKS if (console.encoding or "").lower().startswith("utf") else _PLAIN_BLOCKS
    legend = Text.assemble(
        "graph, in execution order: ", (blocks["N"], "green"), " NPU  ", (blocks["C"], "red"), " CPU"
    )
    console.print(legend)
    before, after = report["before"]["places"], report["after"]["places"]
    rows = [("now", before)] if before == after else [("now", before), ("after", after)]
    for label, places in rows:
        width = max(console.width - _MARGIN, 10)
        cells = _condense(places, width * _LINES)
        for start in range(0, len(cells), width):
            line = Text(f" {label if not start else '':<6}")
            for cell in cells[start : start + width]:
                line.append(blocks[cell], style="green" if cell == "N" else "red")
            console.print(line)
    if after != before:
        console.print(f"after: with what `roundel quantize --device {report['device']}` does by itself")


def _condense(places: str, most: int) -> str:
    """At most so many cells; a cell that holds any CPU node is a CPU cell."""
    if len(places) <= most:
        return places
    step = -(-len(places) // most)
    return "".join("C" if "C" in places[i : i + step] else "N" for i in range(0, len(places), step))


def _findings(findings: Sequence[Tree]) -> Table:
    groups: dict[tuple[str, str, str, bool], list[Tree]] = {}
    for finding in findings:
        key = (finding["rule"], finding["severity"], finding["fix"], finding["automatic"])
        groups.setdefault(key, []).append(finding)
    table = Table(box=None, padding=(0, 1))
    table.add_column("rule", no_wrap=True)
    table.add_column("level", no_wrap=True)
    table.add_column("n", justify="right", no_wrap=True)
    table.add_column("what, why, fix", overflow="fold", ratio=1)
    for (rule, level, fix, automatic), members in groups.items():
        first = members[0]
        lines = [f"[bold]{escape(first['title'])}[/]: {escape(first['message'])}"]
        lines += [f"[dim]at[/] {escape(names)}" for names in _subjects(members)]
        lines.append(f"[dim]why[/] {escape(first['why'])}")
        done = " [green](quantize --device does this by itself)[/]" if automatic else ""
        lines.append(f"[dim]fix[/] {escape(fix)}{done}")
        table.add_row(rule, f"[{_COLOURS[level]}]{level}[/]", str(len(members)), "\n".join(lines))
    return table


def _subjects(members: Sequence[Tree]) -> list[str]:
    names = [str(member["subject"]) for member in members if member["subject"]]
    if not names:
        return []
    more = len(names) - _FIRST_NODES
    return [", ".join(names[:_FIRST_NODES]) + (f" and {more} more" if more > 0 else "")]


def _nodes(before: Sequence[Tree], after: Sequence[Tree]) -> Table:
    table = Table(box=None, padding=(0, 1))
    for heading in ("node", "operator", "now", "after", "why"):
        table.add_column(heading, overflow="fold")
    for old, new in zip(before, after, strict=True):
        why = old["reason"] and f"{old['rule']}: {old['reason']}"
        table.add_row(escape(old["name"]), old["op"], _place(old), _place(new), escape(why))
    return table


def _place(node: Tree) -> str:
    return f"[green]NPU {node['island']}[/]" if node["place"] == "npu" else "[red]CPU[/]"
