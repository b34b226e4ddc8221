"""Results as plain values for JSON, and as small cards for people."""

from __future__ import annotations

import csv
import html
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def to_plain(value: object) -> Any:
    """Dictionaries, lists, numbers and text, of dataclasses, enums, paths and containers.

    A number that is not finite becomes text (inf, -inf, nan), since JSON has none.

    Raises:
        TypeError: a value is none of these.
    """
    from pydantic_core import to_jsonable_python

    return _finite(to_jsonable_python(value, fallback=_fallback))


def from_plain(kind: type[T], tree: object) -> T:
    """What `to_plain` made plain.

    Raises:
        pydantic.ValidationError: it was no such value.
    """
    from pydantic import TypeAdapter

    return TypeAdapter(kind).validate_python(tree)


def _fallback(value: object) -> object:
    """What pydantic does not know: mappings that are no dictionaries, and numpy's numbers."""
    import numpy as np

    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no plain form")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


_WIDTH = 100  # characters of a value; names of models and tensors can be long
_STYLE = "text-align:left;padding:0 1em 0 0"


class Card:
    """Base of results that hold more than anybody wants to see at once.

    A dataclass with this base is declared with `repr=False`, since it would write a `__repr__` of its own.
    """

    __slots__ = ()

    def card(self) -> Mapping[str, object]:
        """What matters most, in the order in which it is shown: at most five entries."""
        raise NotImplementedError

    def __repr__(self) -> str:
        rows = {name: _short(value) for name, value in self.card().items()}
        width = max(map(len, rows), default=0)
        return "\n".join(
            [type(self).__name__, *(f"  {name:<{width}}  {text}" for name, text in rows.items())]
        )

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><th style="{_STYLE}">{html.escape(name)}</th>'
            f'<td style="{_STYLE}">{html.escape(_short(value))}</td></tr>'
            for name, value in self.card().items()
        )
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"


def csv_text(rows: Sequence[Mapping[str, object]]) -> str:
    """A heading, and a line for each row; what a row lacks, or has as None, stays empty."""
    text = io.StringIO()
    writer = csv.DictWriter(
        text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def listed(items: Sequence[object], most: int) -> str:
    """'a, b and 3 more'."""
    more = len(items) - most
    return ", ".join(map(str, items[:most])) + (f" and {more} more" if more > 0 else "")


def counted(count: int, what: str) -> str:
    """'1 note', '2 notes'."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def decibel(value: float | None) -> str:
    """A short number; equal outputs have no noise at all."""
    if value is None:
        return "not measured"
    if value in (float("inf"), float("-inf")):
        return "exact" if value > 0 else "-inf"
    return f"{value:.1f} dB"


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"
