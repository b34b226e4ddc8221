"""Two kinds of pictures as SVG, with logarithmic axes. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#d1495b", "#edae49", "#00798c", "#6a4c93", "#8d99ae", "#2e933c")
WIDTH, LEFT, RIGHT, LINE = 900, 190, 20, 16

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Scale:
    """A logarithmic axis from ``low`` to ``high``, drawn between two places."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """1, 2 and 5 of every power of ten that is inside."""
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        found = [step * 10.0**power for power in powers for step in (1, 2, 5)]
        return [value for value in found if self.low <= value <= self.high]


def around(values: Sequence[float], start: float, end: float) -> Scale:
    """An axis that has room for all values."""
    return Scale(min(values) / 1.3, max(values) * 1.3, start, end)


def text(x: float, y: float, content: str, *, anchor: str = "start", bold: bool = False) -> str:
    """A piece of text."""
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(content)}</text>'


def line(x1: float, y1: float, x2: float, y2: float) -> str:
    """A line of the grid."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'


def circle(x: float, y: float, colour: str) -> str:
    """One value."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}" fill-opacity="0.85"/>'


def legend(names: Sequence[str], y: float) -> list[str]:
    """The series with their colours, in one line."""
    parts, x = [], float(LEFT)
    for name, colour in zip(names, COLOURS, strict=False):
        parts += [circle(x, y - 4, colour), text(x + 9, y, name)]
        x += 40 + 7 * len(name)
    return parts


def dots(panels: Mapping[str, Mapping[str, Mapping[str, float]]], unit: str) -> str:
    """Panels of rows with one dot for each series: ``{panel: {row: {series: value}}}``."""
    names = list(dict.fromkeys(name for panel in panels.values() for row in panel.values() for name in row))
    parts, y = legend(names, 20), 50.0
    for title, rows in panels.items():
        across = around([v for row in rows.values() for v in row.values()], LEFT, WIDTH - RIGHT)
        parts.append(text(LEFT, y, f"{title} ({unit})", bold=True))
        bottom = y + LINE * (len(rows) + 1)
        for tick in across.ticks():
            parts += [line(across(tick), y + 6, across(tick), bottom)]
            parts += [text(across(tick), bottom + 12, f"{tick:g}", anchor="middle")]
        for row, values in rows.items():
            y += LINE
            parts += [text(LEFT - 8, y + 8, row, anchor="end"), line(LEFT, y + 4, WIDTH - RIGHT, y + 4)]
            parts += [circle(across(value), y + 4, COLOURS[names.index(n)]) for n, value in values.items()]
        y = bottom + 45
    return picture(parts, y)


def curves(panels: Mapping[str, Mapping[str, Sequence[Point]]], unit: str) -> str:
    """Panels of curves over a logarithmic axis: ``{panel: {series: [(x, y), ...]}}``."""
    parts: list[str] = []
    top, height = 10.0, 260
    for title, series in panels.items():
        points = [point for curve in series.values() for point in curve]
        across = around([x for x, _ in points], LEFT, WIDTH - RIGHT)
        down = around([y for _, y in points], top + height, top + 40)
        parts += [text(LEFT, top + 14, f"{title} ({unit})", bold=True), *legend(list(series), top + 32)]
        for tick in down.ticks():
            parts += [line(LEFT, down(tick), WIDTH - RIGHT, down(tick))]
            parts += [text(LEFT - 8, down(tick) + 4, f"{tick:g}", anchor="end")]
        for x in sorted({x for x, _ in points}):
            parts += [text(across(x), top + height + 14, f"{x:g}", anchor="middle")]
        for colour, curve in zip(COLOURS, series.values(), strict=False):
            path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in curve)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
            parts += [circle(across(x), down(y), colour) for x, y in curve]
        top += height + 40
    return picture(parts, top)


def picture(parts: Sequence[str], height: float) -> str:
    """The whole file."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
        'font-family="sans-serif" font-size="11">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""])
