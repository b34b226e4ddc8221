"""A comparison on the terminal, within 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from roundel.report.console import size

Tree = Mapping[str, Any]

_WORST = 20
_NAME_WIDTH = 22
_OP_WIDTH = 8


def show_comparison(console: Console, tree: Tree, *, everything: bool, weights: bool) -> None:
    """Print what `Comparison.to_dict` holds.

    Args:
        console: where to.
        tree: the comparison.
        everything: all tensors in order of execution, instead of those whose layers introduce most.
        weights: list the weights, too.
    """
    _summary(console, tree)
    tensors = tree["tensors"]
    shown = tensors if everything else _worst(tensors)
    title = "all tensors" if everything else f"the {len(shown)} layers that introduce most, of {len(tensors)}"
    console.print(_tensors(shown, title))
    if weights:
        ranked = sorted(tree["weights"], key=lambda w: _number(w["error"]["sqnr_db"]))
        console.print(_weights(ranked if everything else ranked[:_WORST]))
    if tree["unmatched"]:
        count = len(tree["unmatched"])
        console.print(f"[dim]{count} tensors of the quantized model have no partner (see --json)[/]")
    for note in tree["notes"]:
        console.print(f"[yellow]note:[/] {escape(note)}", highlight=False)


def _summary(console: Console, tree: Tree) -> None:
    table = Table(show_header=False, box=None, padding=(0, 1))
    for label, name, count in (
        ("float", tree["float_model"], tree["float_bytes"]),
        ("quantized", tree["quantized_model"], tree["quantized_bytes"]),
    ):
        table.add_row(label, f"{escape(name)} ({size(count)})")
    table.add_row("samples", f"{tree['samples']}, {tree['seconds']['total']:.1f} s")
    for out in tree["outputs"]:
        difference = out["difference"]
        words = [f"{_db(difference)} dB", f"cosine {difference['cosine']:.5f}"]
        if out["same_top"] is not None:
            words.append(f"same top-1 {out['same_top']:.1%}")
        table.add_row("output", f"{escape(out['name'])}: {', '.join(words)}")
    console.print(table, highlight=False)


def _worst(tensors: Sequence[Tree]) -> list[Tree]:
    known = [t for t in tensors if t["introduced"] is not None]
    return sorted(known, key=lambda t: _number(t["introduced"]["sqnr_db"]))[:_WORST]


def _tensors(tensors: Sequence[Tree], title: str) -> Table:
    table = Table(title=f"{title} (SQNR in dB)", title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("tensor", no_wrap=True)
    table.add_column("op", no_wrap=True)
    for heading in ("intro-\nduced", "inher-\nited", "\ntotal", "\ncosine", "cut\noff", "range\nused"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("worst\nchannels", no_wrap=True)
    for t in tensors:
        channels = " ".join(str(c["channel"]) for c in t["worst_channels"][:2])
        table.add_row(
            _label(t["name"]),
            escape(_begun(t["op"])),
            _db(t["introduced"]),
            _db(t["inherited"]),
            _db(t["total"]),
            f"{t['total']['cosine']:.4f}",
            _percent(t["saturated"]),
            _percent(t["range_use"]),
            channels,
        )
    return table


def _weights(weights: Sequence[Tree]) -> Table:
    table = Table(title="weights (SQNR in dB)", title_justify="left", box=None, padding=(0, 1, 0, 0))
    for heading in ("weight", "op", "role", "stored as", "SQNR", "cut off", "worst channels"):
        table.add_column(heading, justify="right" if heading in ("SQNR", "cut off") else "left", no_wrap=True)
    for w in weights:
        storage = w["storage"]
        kind = "float" if storage is None else storage["dtype"]
        if storage is not None and storage["scales"] > 1:
            kind += f" x{storage['scales']}"
        channels = " ".join(str(c["channel"]) for c in w["worst_channels"])
        cells = (_begun(w["op"]), w["role"], kind, _db(w["error"]), _percent(w["saturated"]))
        table.add_row(_label(w["name"]), *cells, channels)
    return table


def shortened(name: str, width: int) -> str:
    """The end of a long name, where names differ."""
    return name if len(name) <= width else "…" + name[1 - width :]


def _begun(op: str) -> str:
    """The beginning of a long operator name."""
    return op if len(op) <= _OP_WIDTH else op[: _OP_WIDTH - 1] + "…"


def _label(name: str) -> str:
    """A tensor's name without what exporters append to every one."""
    return escape(shortened(name.removesuffix("_output_0"), _NAME_WIDTH))


def _number(value: Any) -> float:
    return float(value)


def _db(difference: Tree | None) -> str:
    if difference is None:
        return "-"
    value = _number(difference["sqnr_db"])
    return "exact" if value == float("inf") else f"{value:.1f}"


def _percent(share: float | None) -> str:
    if share is None:
        return "-"
    return f"{share:.1%}" if 0 < share < 0.1 else f"{share:.0%}"
