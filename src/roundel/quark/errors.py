"""Errors of the front door: Roundel's, and at the same time the built-in ones that scripts catch."""

from __future__ import annotations

import logging
import os
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


STRICT = "ROUNDEL_QUARK_STRICT"
"""Set in the environment, by `--strict`, so that workers know it, too."""

_LOG = logging.getLogger("roundel.quark")


def go_on(error: QuarkConfigError) -> None:
    """What scripts get away with elsewhere: a warning on stderr, or in the script's log, and the run goes on.

    Raises:
        QuarkConfigError: the same as an error, where the script runs with `--strict`.
    """
    if os.environ.get(STRICT):
        raise error
    told = [f"{label}: {text}" for label, text in error.details() if label != "expected"]
    _LOG.warning("WARNING: %s", " ".join([error.what, *(["(" + "; ".join(told) + ")"] if told else [])]))


def named(what: str, name: object, table: Mapping[str, Entry], where: str | None = None) -> Entry:
    """The entry of that name.

    Raises:
        QuarkConfigError: there is none; it is a ValueError, too.
    """
    if not isinstance(name, str) or name not in table:
        raise QuarkConfigError.unknown(f"There is no {what} '{name}'.", name, sorted(table), where=where)
    return table[name]
