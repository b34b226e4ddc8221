"""Results that show themselves in a few lines: as text in a terminal, as a small table in a notebook."""

from __future__ import annotations

import html
from collections.abc import Mapping

_WIDTH = 100  # characters of a value; names of models and tensors can be long
_STYLE = "text-align:left;padding:0 1em 0 0"


class Card:
    """Base of results that hold more than anybody wants to see at once.

    A dataclass with this base is declared with `repr=False`, since it would write a `__repr__` of its own.
    """

    __slots__ = ()

    def card(self) -> Mapping[str, object]:
        """What matters most, in the order in which it is shown: at most four entries."""
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
