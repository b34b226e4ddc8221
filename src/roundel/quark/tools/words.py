"""Lists and shapes as the command line writes them."""

from __future__ import annotations

import re

_SHAPE = re.compile(r"\s*(?P<name>.+?)\s*:\s*\[(?P<sizes>[\d\s,.]+)\]\s*")


def words(text: str) -> tuple[str, ...]:
    """'Conv,Gemm', or the same with brackets and quotes around."""
    return tuple(word for word in (part.strip(" []'\"") for part in text.split(",")) if word)


def shapes(text: str) -> dict[str, tuple[int, ...]]:
    """'input_1:[1,3,224,224];input_2:[1,96]' by name.

    Raises:
        ValueError: the text has another form.
    """
    found = {}
    for part in filter(str.strip, text.split(";")):
        match = _SHAPE.fullmatch(part)
        if match is None:
            raise ValueError(part)
        sizes = [size for size in re.split(r"[,.]", match["sizes"]) if size.strip()]
        found[match["name"]] = tuple(int(size) for size in sizes)
    return found
