"""Errors of the front door: Roundel's, and at the same time the built-in ones that scripts catch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypedDict, TypeVar

from roundel.errors import DataError, ModelError, RecipeError, did_you_mean

Entry = TypeVar("Entry")


class QuarkConfigError(RecipeError, ValueError):
    """A config, preset name or option is wrong, or asks for something that Roundel does not do."""


class QuarkModelMissingError(ModelError, FileNotFoundError):
    """The model file does not exist."""


class QuarkDataError(DataError, ValueError):
    """There is no calibration data, or it cannot be used."""


class _Alternatives(TypedDict):
    expected: str
    hint: str | None


def expected_names(name: str, names: Iterable[str]) -> _Alternatives:
    """The names that would have been right, and the nearest of them."""
    pool = sorted(names)
    return {"expected": ", ".join(pool), "hint": did_you_mean(name, pool)}


def named(what: str, name: object, table: Mapping[str, Entry], where: str | None = None) -> Entry:
    """The entry of that name.

    Raises:
        QuarkConfigError: there is none; it is a ValueError, too.
    """
    if not isinstance(name, str) or name not in table:
        raise QuarkConfigError(
            f"There is no {what} '{name}'.", where=where, **expected_names(str(name), table)
        )
    return table[name]
