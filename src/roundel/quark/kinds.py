"""Which values an option takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Kind:
    """Values of one kind, in words and as a test."""

    words: str
    fits: Callable[[Any], bool]


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _all(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(fits, value))


SWITCH = Kind("True or False", lambda v: isinstance(v, bool))
NUMBER = Kind("a number", _number)
NUMBER_OR_NONE = Kind("a number or None", lambda v: v is None or _number(v))
INTEGER = Kind("a whole number", _integer)
COUNT = Kind("a whole number above 0", lambda v: _integer(v) and v > 0)
TEXT = Kind("a text", lambda v: isinstance(v, str))
TEXTS = Kind("a list of texts", _all(lambda item: isinstance(item, str)))
PAIR = Kind("a pair of numbers", lambda v: isinstance(v, list | tuple) and len(v) == 2)
PAIRS = Kind("a list of pairs", _all(lambda item: len(item) == 2))
NUMBERS = Kind("a list of numbers", _all(_number))
TABLE = Kind("a dictionary", lambda v: isinstance(v, Mapping))
PATH = Kind("a path", lambda v: isinstance(v, str) or hasattr(v, "__fspath__"))
ANY = Kind("anything", lambda v: True)


def one_of(*words: str) -> Kind:
    """A choice between words."""
    return Kind(" or ".join(map(repr, words)), lambda v: isinstance(v, str) and v in words)


def kind_of(default: Any) -> Kind:
    """The kind that a default shows; anything where there is none."""
    if isinstance(default, int) and not isinstance(default, bool):
        return COUNT if default > 0 else INTEGER
    kinds = {bool: SWITCH, float: NUMBER, str: TEXT, list: TEXTS, dict: TABLE}
    return kinds.get(type(default), ANY)
