"""What a row of the option table is: a key, its default, which values it takes, and what they become."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from roundel.quark.errors import QuarkConfigError

if TYPE_CHECKING:
    from roundel.quark.request import Request


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
TEXTS_OR_NONE = Kind("a list of texts or None", lambda v: v is None or TEXTS.fits(v))
PAIR = Kind("a pair of numbers", lambda v: isinstance(v, list | tuple) and len(v) == 2)
PAIRS = Kind("a list of pairs", _all(lambda item: len(item) == 2))
NUMBERS = Kind("a list of numbers", _all(_number))
TABLE = Kind("a dictionary", lambda v: isinstance(v, Mapping))
PATH = Kind("a path", lambda v: isinstance(v, str) or hasattr(v, "__fspath__"))
PATH_OR_SWITCH = Kind("a path", lambda v: isinstance(v, bool) or PATH.fits(v))
PAIR_OR_NOTHING = Kind("a pair of numbers or ()", lambda v: PAIR.fits(v) or v == ())
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


# In each form of a row, the kind is that of the default unless it is given.
def to_field(
    key: str,
    default: Any,
    path: str,
    kind: Kind | None = None,
    *,
    to: Callable[[Any, Request], Any] | None = None,
) -> Option:
    """The value goes into a recipe field, as it is or as `to` has it, whose None changes nothing."""

    def work(value: Any, request: Request) -> Effect:
        if to is not None and (value := to(value, request)) is None:
            return NOTHING
        return Effect(recipe={path: value})

    return computed(key, default, path, work, kind)


def computed(key: str, default: Any, becomes: str, work: Work, kind: Kind | None = None) -> Option:
    """The effect needs a function."""
    return Option(key, default, kind or kind_of(default), becomes, work)


def switched(key: str, default: bool, becomes: str, recipe: Flat) -> Option:
    """Recipe values where the switch stands otherwise than by default."""
    return Option(key, default, SWITCH, becomes, lambda v, _: NOTHING if v is default else Effect(recipe))


def to_run(key: str, default: Any, name: str, kind: Kind | None = None) -> Option:
    """The value concerns the run, not the model."""
    becomes = f"the run: {name.replace('_', ' ')}"
    return computed(key, default, becomes, lambda v, _: Effect(run={name: v}), kind)


def noted(key: str, default: Any, why: str, kind: Kind | None = None) -> Option:
    """Without effect: Roundel works like that anyhow, or chooses itself."""

    def work(value: Any, request: Request) -> Effect:
        return NOTHING if value == default else Effect(note=f"{key}: {why}")

    return computed(key, default, f"always so: {why}", work, kind)


def refused(key: str, default: Any, why: str, instead: str) -> Option:
    """Only the default is taken."""

    def work(value: Any, request: Request) -> Effect:
        if value == default:
            return NOTHING
        raise unsupported(key, value, why, instead)

    return Option(key, default, ANY, f"refused: {why} Instead: {instead}", work)


def unsupported(key: str, value: Any, why: str, instead: str) -> QuarkConfigError:
    """The error for an option that Roundel does not do."""
    return QuarkConfigError(
        f"Roundel does not do what '{key}' asks for: {why}",
        where=f"extra_options['{key}']",
        observed=repr(value)[:120],
        hint=instead,
    )


Table = Mapping[str, Option]


def by_key(*rows: Option) -> Table:
    """A nested table."""
    return {row.key: row for row in rows}
