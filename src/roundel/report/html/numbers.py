"""Numbers as a page needs them: short, and legal JSON."""

from __future__ import annotations

import math

_DIGITS = 5


def short(value: float | None) -> float | int | str | None:
    """At most five digits; numbers that are not finite become the words that the page's scripts know."""
    if value is None:
        return None
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    rounded = float(f"{value:.{_DIGITS}g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e15 else rounded


def percent(share: float) -> str:
    """A share of 0 to 1 in words."""
    number = 100 * share
    if number == 0 or number >= 99.95:
        return f"{number:.0f} %"
    if number < 0.01:
        return "less than 0.01 %"
    return f"{number:.0f} %" if number >= 10 else f"{number:.2g} %"
