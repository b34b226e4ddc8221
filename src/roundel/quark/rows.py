"""What a row of the option table is: a key, its default, and what it becomes in a recipe or a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from roundel.quark.errors import QuarkConfigError

if TYPE_CHECKING:
    from roundel.quark.request import Request

Flat = Mapping[str, Any]
"""Recipe or run values by dotted name."""


@dataclass(frozen=True, slots=True)
class Effect:
    """What one option does: recipe values, run settings, and a sentence where the reader should know."""

    recipe: Flat = field(default_factory=dict)
    run: Flat = field(default_factory=dict)
    note: str | None = None


NOTHING = Effect()
Work = Callable[[Any, "Request"], Effect]


@dataclass(frozen=True, slots=True)
class Option:
    """One key.

    Args:
        key: as scripts write it.
        default: the reference's own; it asks for nothing.
        kind: which values make sense.
        becomes: for the reader: recipe fields, or the reason why not.
        work: the effect of a value.
    """

    key: str
    default: Any
    kind: Kind
    becomes: str
    work: Work

    def effect(self, value: Any, request: Request) -> Effect:
        """What the value does.

        Raises:
            QuarkConfigError: the value is of the wrong kind, or Roundel does not do what it asks for.
        """
        if value is None and self.default is None:
            return NOTHING
        if not self.kind.fits(value):
            raise QuarkConfigError(
                "An option has a value of the wrong kind.",
                where=f"extra_options['{self.key}']",
                observed=repr(value)[:120],
                expected=self.kind.words,
            )
        return self.work(value, request)


@dataclass(frozen=True, slots=True)
class Kind:
    """Which values an option takes."""

    words: str
    fits: Callable[[Any], bool]


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)


SWITCH = Kind("True or False", lambda v: isinstance(v, bool))
NUMBER = Kind("a number", _number)
INTEGER = Kind("a whole number", _integer)
COUNT = Kind("a whole number above 0", lambda v: _integer(v) and v > 0)
TEXT = Kind("a text", lambda v: isinstance(v, str))
TEXTS = Kind("a list of texts", _texts)
PAIRS = Kind("a list of pairs", lambda v: isinstance(v, list | tuple) and all(len(p) == 2 for p in v))
NUMBER_LIST = Kind("a list of numbers", lambda v: isinstance(v, list | tuple) and all(map(_number, v)))
TABLE = Kind("a dictionary", lambda v: isinstance(v, Mapping))
PATH = Kind("a path", lambda v: isinstance(v, str) or hasattr(v, "__fspath__"))
ANY = Kind("anything", lambda v: True)


def to_field(key: str, default: Any, kind: Kind, *paths: str) -> Option:
    """The value goes straight into recipe fields."""

    def work(value: Any, request: Request) -> Effect:
        return Effect(recipe=dict.fromkeys(paths, value))

    return Option(key, default, kind, ", ".join(paths), work)


def to_word(key: str, default: str, path: str, words: Mapping[str, Any]) -> Option:
    """A choice between words, each with its own in the recipe."""

    def work(value: Any, request: Request) -> Effect:
        return Effect(recipe={path: words[value]})

    kind = Kind(" or ".join(repr(word) for word in words), lambda v: isinstance(v, str) and v in words)
    return Option(key, default, kind, path, work)


def computed(key: str, default: Any, kind: Kind, becomes: str, work: Work) -> Option:
    """The effect needs a function."""
    return Option(key, default, kind, becomes, work)


def switched(key: str, default: bool, becomes: str, recipe: Flat) -> Option:
    """Recipe values where the switch stands otherwise than by default."""

    def work(value: Any, request: Request) -> Effect:
        return NOTHING if value is default else Effect(recipe=recipe)

    return Option(key, default, SWITCH, becomes, work)


def to_run(key: str, default: Any, kind: Kind, name: str) -> Option:
    """The value concerns the run, not the model."""

    def work(value: Any, request: Request) -> Effect:
        return Effect(run={name: value})

    return Option(key, default, kind, f"the run: {name.replace('_', ' ')}", work)


def always(key: str, default: Any, kind: Kind, why: str, *, refuse: tuple[Any, ...] = ()) -> Option:
    """Roundel works like that anyhow, or chooses itself; values in `refuse` ask for the opposite."""

    def work(value: Any, request: Request) -> Effect:
        if any(value is no for no in refuse):
            raise refusal(key, value, why, "Leave the option out.")
        return NOTHING if value == default else Effect(note=f"{key}: {why}")

    return Option(key, default, kind, f"always so: {why}", work)


def refused_option(key: str, default: Any, why: str, instead: str, kind: Kind = ANY) -> Option:
    """Only the default is taken."""

    def work(value: Any, request: Request) -> Effect:
        if value == default:
            return NOTHING
        raise refusal(key, value, why, instead)

    return Option(key, default, kind, f"refused: {why} Instead: {instead}", work)


def refusal(key: str, value: Any, why: str, instead: str) -> QuarkConfigError:
    """The error for an option that Roundel does not do."""
    return QuarkConfigError(
        f"Roundel does not do what '{key}' asks for: {why}",
        where=f"extra_options['{key}']",
        observed=repr(value)[:120],
        hint=instead,
    )
