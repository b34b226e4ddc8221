"""A plain table for the examples."""

from __future__ import annotations

from collections.abc import Sequence


def show(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under headings, in columns as wide as they need, as Markdown."""
    cells = [[str(cell) for cell in row] for row in (headings, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    print("\n".join(lines))
