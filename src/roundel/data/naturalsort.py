"""The order in which people list files: img2 before img10."""

from __future__ import annotations

import re
from pathlib import PurePath

_DIGITS = re.compile(r"([0-9]+)")


def natural_key(path: PurePath) -> tuple[object, ...]:
    """A sort key that compares runs of digits as numbers, part by part of the path."""
    parts = tuple(
        tuple(
            (0, int(piece), "") if piece.isdigit() else (1, 0, piece)
            for piece in _DIGITS.split(part.casefold())
        )
        for part in path.parts
    )
    # The plain text last, so that names that differ only in case or in leading zeros keep one order.
    return (parts, str(path))
