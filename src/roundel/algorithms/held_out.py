"""Samples that steps do not learn from, and are judged by."""

from __future__ import annotations

FEWEST = 4  # samples: with fewer, nothing is left to judge by
_SHARE = 0.2


def held_out(count: int) -> int:
    """How many of the last samples judge the steps that learn from the others."""
    return max(1, round(count * _SHARE))
