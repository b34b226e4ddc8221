"""How much memory a run may take, and what follows from it.

Nothing here decides a number in the result: with less memory the same work is done in smaller pieces, or from
files instead of from memory.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from roundel.errors import RecipeError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Budget:
    """What may lie in memory at once, in bytes.

    Attributes:
        live: activations that are fetched from all runs in flight; more run in several passes.
        held: arrays of one kind that are kept for later (samples, layer outputs); more go to a file.
        lean: weights beyond which sessions run from the mapped file, without copies of their own: slower.
        returns: whether freed blocks go back to the system at once: slower, too.
    """

    live: int = 1_500_000_000
    held: int = 64_000_000
    lean: int = 1_000_000_000
    returns: bool = False


_DEFAULT = Budget()
_CURRENT: ContextVar[Budget] = ContextVar("roundel_memory_budget", default=_DEFAULT)


def budget() -> Budget:
    """What the run that is going on may take."""
    return _CURRENT.get()


@contextmanager
def within(given: Budget) -> Iterator[None]:
    """Run the block with another budget; other threads keep theirs."""
    token = _CURRENT.set(given)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def parse_size(text: str | int) -> int:
    """Bytes from '2G', '512M', '1.5GiB' or a number.

    Raises:
        RecipeError: it is none of these.
    """
    found = _SIZE.fullmatch(str(text))
    if found is None:
        raise RecipeError(
            "A size of memory cannot be read.", observed=text, expected="for example 2G, 512M or 1.5GiB"
        )
    number, unit, binary = found.groups()
    if binary and not unit:
        raise RecipeError("A size of memory cannot be read.", observed=text, expected="2G or 2GiB")
    return round(float(number) * (_BINARY if binary else _UNITS)[unit.lower()])


def show_size(count: float) -> str:
    """Bytes in words that `parse_size` reads back, rounded up."""
    for unit, factor in (("G", 10**9), ("M", 10**6)):
        if count >= factor:
            tenths = -int(-count * 10 // factor)
            return f"{tenths // 10}.{tenths % 10}{unit}"
    return f"{-int(-count // 1000)}k"


@contextmanager
def collector_paused() -> Iterator[None]:
    """No search for garbage while graphs are built: it reads every node again and again, and finds none."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()
