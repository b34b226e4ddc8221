"""Notes on the terminal: all of them, but a flood of one kind is one line."""

from __future__ import annotations

import io

from rich.console import Console

from roundel.report.console import show_notes


def lines(*notes: str) -> list[str]:
    stream = io.StringIO()
    show_notes(Console(file=stream, width=200), notes)
    return stream.getvalue().splitlines()


def test_a_flood_of_one_kind_is_one_line() -> None:
    moved = [f"position of 't{i}' moved from {i} to {i - 2}" for i in range(15)]
    shown = lines("Clip to Relu: 5 nodes", *moved, "position of 't3' moved from 1 to 0")
    assert shown == [
        "note: Clip to Relu: 5 nodes",
        "note: position of 't0' moved from 0 to -2, and likewise for 14 others: 't1', 't2', …",
    ]


def test_a_few_are_all_shown() -> None:
    notes = [f"position of 't{i}' moved from 3 to 2" for i in range(3)] + ["no 'data'", "no 'labels' 1"]
    assert lines(*notes) == [f"note: {note}" for note in notes]
