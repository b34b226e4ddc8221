"""Every error a user can cause: what happened, where, what was seen, what was expected, what to do."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable
from typing import ClassVar, Self


class RoundelError(Exception):
    """Base of all errors that a user can cause.

    Args:
        what: one sentence that says what went wrong.
        where: the file, node, tensor, sample or option concerned.
        observed: what was found there.
        expected: what would have been right.
        hint: the next step for the reader.
    """

    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        observed: object = None,
        expected: object = None,
        hint: str | None = None,
    ) -> None:
        self.what = what
        self.where = None if where is None else str(where)
        self.observed = None if observed is None else str(observed)
        self.expected = None if expected is None else str(expected)
        self.hint = hint
        super().__init__(what)

    @classmethod
    def unknown(
        cls,
        what: str,
        name: object,
        names: Iterable[str],
        *,
        where: object = None,
        observed: object = None,
        hint: str | None = None,
    ) -> Self:
        """For a name that is none of those there are; the hint is for one that is close to none of them."""
        pool = list(names)
        near = did_you_mean(str(name), pool)
        return cls(what, where=where, observed=observed, expected=", ".join(pool), hint=near or hint)

    def details(self) -> list[tuple[str, str]]:
        """The labelled lines below the headline, in reading order."""
        rows = [
            ("where", self.where),
            ("observed", self.observed),
            ("expected", self.expected),
            ("what to do", self.hint),
        ]
        if (self.hint or "").startswith("Did you mean"):  # not below a list of hundred names
            rows.insert(2, rows.pop())
        return [(label, text) for label, text in rows if text]

    def __str__(self) -> str:
        return "\n".join([self.what, *(f"  {label}: {text}" for label, text in self.details())])

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive Exception's own pickling; worker processes need them.
        return functools.partial(type(self), self.what, **self._told()), ()

    def _told(self) -> dict[str, str | None]:
        """The keyword arguments that it was made with."""
        return {name: getattr(self, name) for name in ("where", "observed", "expected", "hint")}


class RecipeError(RoundelError):
    """The recipe, preset or an option is wrong."""

    exit_code = 2


class ModelError(RoundelError):
    """The model cannot be read or cannot be quantized."""

    exit_code = 3


class DataError(RoundelError):
    """The calibration data does not fit the model, or is broken."""

    exit_code = 4


class InfiniteTensorError(DataError):
    """Tensors that the model computes are infinite for a sample that is not: masks, as a rule.

    Attributes:
        tensors: their names.
    """

    tensors: tuple[str, ...] = ()

    @classmethod
    def of(cls, tensors: Iterable[str], error: DataError) -> InfiniteTensorError:
        """The same words, with the tensors that they are about."""
        made = cls(error.what, **error._told())
        made.tensors = tuple(tensors)
        return made

    def __reduce__(self) -> tuple[object, ...]:
        rebuild, arguments = super().__reduce__()
        return rebuild, arguments, {"tensors": self.tensors}


class SelectionError(RecipeError):
    """A name, pattern or subgraph that selects nodes or tensors matches nothing."""


class OutputError(RoundelError):
    """The result cannot be written."""

    exit_code = 5


class VerifyError(RoundelError):
    """The finished model breaks a rule of its target; nothing was written."""

    exit_code = 6


class DependencyError(RoundelError):
    """An optional package is needed and not installed."""

    exit_code = 7


class ExecutorError(RoundelError):
    """The workers or the cluster failed, again and again."""

    exit_code = 8


def did_you_mean(name: str, candidates: Iterable[str]) -> str | None:
    """A 'did you mean' sentence, or None when nothing comes close."""
    pool = sorted(set(candidates))
    by_fold = {c.casefold(): c for c in pool}
    near = difflib.get_close_matches(name.casefold(), by_fold, n=3, cutoff=0.55)
    if not near:
        near = [fold for fold in by_fold if name.casefold() in fold][:3]
    if not near:
        return None
    return "Did you mean " + " or ".join(f"'{by_fold[fold]}'" for fold in near) + "?"
