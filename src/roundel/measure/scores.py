"""What one model says about one sample, in the few numbers that every score follows from, and their sums.

The user's own metrics are here as well: functions that are found by their names.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundel.errors import RecipeError, did_you_mean
from roundel.numerics.metrics import Closeness
from roundel.types import Array, Arrays

Metric = Callable[[list[Any], list[Any] | None], Any]

_FORM = "module:function or file.py:function"


def named_metric(metric: str | Metric | None) -> tuple[str, Metric | None]:
    """The name of a metric, and its function: the one that 'module:function' or 'file.py:function' means.

    The function is called once for each model with two lists: the model's outputs, one entry for each sample
    (an array, or a dictionary of arrays where the model has several outputs), and the labels of each sample's
    rows (None when there are none). It returns a number, or a dictionary of numbers.

    Raises:
        RecipeError: there is no such function.
    """
    if not isinstance(metric, str):
        return getattr(metric, "__name__", "metric"), metric
    home, colon, name = metric.rpartition(":")
    if not colon or not home or not name:
        raise RecipeError("The metric's name is not complete.", observed=metric, expected=_FORM)
    module = _from_file(Path(home)) if home.endswith(".py") else _from_name(home)
    function = getattr(module, name, None)
    if not callable(function):
        raise RecipeError(
            f"There is no function '{name}' there.", where=home, hint=did_you_mean(name, dir(module))
        )
    return name, function


def scores(name: str, function: Metric, outputs: list[Any], labels: list[Any] | None) -> dict[str, float]:
    """What the metric says, by name.

    Raises:
        RecipeError: the metric fails, or gives something else than numbers.
    """
    try:
        result = function(outputs, labels)
    except Exception as error:
        # Deliberately broad: the user's own code runs here and may raise anything.
        raise RecipeError(
            "The metric failed.", where=name, observed=f"{type(error).__name__}: {error}"
        ) from error
    named = dict(result) if isinstance(result, Mapping) else {name: result}
    try:
        found = {str(key): float(value) for key, value in named.items()}
    except (TypeError, ValueError) as error:
        raise RecipeError(
            "The metric gave no number.", where=name, observed=repr(result)[:200], expected="a number"
        ) from error
    if not all(math.isfinite(value) for value in found.values()):
        raise RecipeError("The metric is not finite.", where=name, observed=found)
    return found


def _from_name(name: str) -> Any:
    # As `python -m` does: a module beside the user is found before installed ones.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RecipeError(
            "The metric's module cannot be imported.", where=name, observed=error, expected=_FORM
        ) from error


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise RecipeError("The metric's file does not exist.", where=path, expected=_FORM)
    spec = importlib.util.spec_from_file_location(f"roundel_metric_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        # Deliberately broad: the user's own code runs here and may raise anything.
        raise RecipeError(
            "The metric's file cannot be run.", where=path, observed=f"{type(error).__name__}: {error}"
        ) from error
    return module


TOP = 5


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """One model, one sample.

    Attributes:
        shape: of the first output.
        classes: how many, 0 where the first output is not class scores.
        best: the classes with the largest scores of each row, the very largest first; [rows, 0] without any.
        same: rows with the same largest score as the reference.
        close: outputs against those of the reference that were given, in their order; without a count where
            the two are not alike.
        outputs: all of them, where a metric wants them.
        seconds: inside the model.
    """

    shape: tuple[int, ...]
    classes: int
    best: NDArray[np.int64]
    same: int
    close: tuple[Closeness, ...] = ()
    outputs: Mapping[str, Array] | None = None
    seconds: float = 0.0

    @property
    def rows(self) -> int:
        """Rows that labels are for."""
        return self.shape[0] if len(self.shape) > 1 else 1

    def arrays(self) -> Arrays:
        """Plain arrays that `from_arrays` reads back."""
        found: Arrays = {
            "shape": np.array(self.shape, np.int64),
            "counts": np.array([self.classes, self.same], np.int64),
            "best": self.best,
            "close": Closeness.table(self.close),
            "seconds": np.array(self.seconds),
        }
        # Names of outputs may hold anything, dots included.
        return found | {f"out.{name}": array for name, array in (self.outputs or {}).items()}

    @staticmethod
    def from_arrays(arrays: Mapping[str, Array], outputs: Sequence[str]) -> Look:
        """The inverse of `arrays`; `outputs` names those that were kept."""
        classes, same = arrays["counts"].tolist()
        return Look(
            tuple(arrays["shape"].tolist()),
            classes,
            arrays["best"],
            same,
            tuple(Closeness.rows(arrays["close"])),
            {name: arrays[f"out.{name}"] for name in outputs} or None,
            float(arrays["seconds"]),
        )


def look(
    outputs: Mapping[str, Array], wanted: Sequence[Array], *, keep: bool = False, seconds: float = 0.0
) -> Look:
    """Look at one model's outputs for one sample.

    Args:
        outputs: in the model's order.
        wanted: the reference's, as many as are to be compared; none for itself.
        keep: whether a metric wants all outputs.
        seconds: inside the model.
    """
    main = next(iter(outputs.values()))
    close = tuple(
        Closeness.of(first, array) if first.shape == array.shape else Closeness()
        for first, array in zip(wanted, outputs.values(), strict=False)
    )
    found = Look(main.shape, 0, np.zeros((0, 0), np.int64), 0, close, outputs if keep else None, seconds)
    table = class_scores(main)
    if table is None:
        return found
    top = table.argmax(1)
    near = np.argpartition(-table, min(TOP, table.shape[1]) - 1, axis=1)[:, :TOP]
    best = np.concatenate([top[:, None], near], axis=1).astype(np.int64)
    alike = bool(wanted) and wanted[0].shape == main.shape
    same = int((top == wanted[0].reshape(table.shape).argmax(1)).sum()) if alike else 0
    return replace(found, classes=table.shape[1], best=best, same=same)


def class_scores(array: Array) -> Array | None:
    """[rows, classes] of an output that is class scores, None of any other."""
    if array.ndim < 2 or array.shape[1] < 2 or array.size != array.shape[0] * array.shape[1]:
        return None
    return array.reshape(array.shape[:2])


@dataclass(slots=True, eq=False)
class ScoreTally:
    """Running counts of one model.

    Attributes:
        rows: of class scores.
        classes: how many.
        right: rows whose largest score is the label's.
        near: rows whose label is among the largest scores.
        same: rows with the same largest score as the reference.
        lost: rows that the reference has right and this model has not.
        won: the other way round.
        close: sums of each output against the reference's.
        kept: what a metric wants of each sample.
        seconds: inside the model.
    """

    rows: int = 0
    classes: int = 0
    right: int = 0
    near: int = 0
    same: int = 0
    lost: int = 0
    won: int = 0
    close: list[Closeness] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, look: Look, labels: Sequence[int] | None = None, first: Look | None = None) -> None:
        """Count one sample's rows.

        Args:
            look: what the model says.
            labels: of the rows.
            first: what the reference says, to count where only one of the two is right.
        """
        self.seconds += look.seconds
        before = self.close or [Closeness()] * len(look.close)
        self.close = [sums.merge(more) for sums, more in zip(before, look.close, strict=True)]
        if look.outputs is not None:
            self.kept.append(next(iter(look.outputs.values())) if len(look.outputs) == 1 else look.outputs)
        if not look.classes:
            return
        self.rows += len(look.best)
        self.classes = look.classes
        self.same += look.same
        if labels is not None:
            hits = look.best == np.asarray(labels)[:, None]
            self.right += int(hits[:, 0].sum())
            self.near += int(hits[:, 1:].any(1).sum())
            if first is not None and first.best.shape[0] == len(hits):
                then = first.best[:, 0] == np.asarray(labels)
                self.lost += int((then & ~hits[:, 0]).sum())
                self.won += int((hits[:, 0] & ~then).sum())


Z = 1.96  # standard errors to either side that hold 95 %


def paired_margin(lost: int, won: int, rows: int) -> float:
    """Half of the 95 % interval of a difference between two shares of the same rows (Bonett and Price).

    Args:
        lost, won: rows that count for the first model only, and for the second only.
        rows: all of them.
    """
    count = rows + 2
    variance = (lost + won + 2 - (lost - won) ** 2 / count) / count**2
    return Z * math.sqrt(max(variance, 0.0))
