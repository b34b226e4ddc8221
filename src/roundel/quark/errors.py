"""Errors of the front door: Roundel's, and at the same time the built-in ones that scripts catch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from roundel.errors import DataError, ModelError, RecipeError

Entry = TypeVar("Entry")


class QuarkConfigError(RecipeError, ValueError):
    """A config, preset name or option is wrong, or asks for something that Roundel does not do."""


class QuarkModelMissingError(ModelError, FileNotFoundError):
    """The model file does not exist."""


class QuarkDataError(DataError, ValueError):
    """There is no calibration data, or it cannot be used."""


def named(what: str, name: object, table: Mapping[str, Entry], where: str | None = None) -> Entry:
    """The entry of that name.

    Raises:
        QuarkConfigError: there is none; it is a ValueError, too.
    """
    if not isinstance(name, str) or name not in table:
        raise QuarkConfigError.unknown(f"There is no {what} '{name}'.", name, sorted(table), where=where)
    return table[name]
