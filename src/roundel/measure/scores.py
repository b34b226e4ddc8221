"""What one model says about one sample, in the few numbers that every score follows from, and their sums.

The labels that it is judged by are here as well, and the user's own metrics: functions that are found by
their names.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundel.data.arrayfiles import load_npy, npz_headers, reading
from roundel.data.folders import natural_key
from roundel.errors import DataError, RecipeError, did_you_mean
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


def check_labels(labels: Sequence[int], classes: int, origin: str) -> None:
    """Labels must be classes that the model has; a score of 0 % would hide that they are not.

    Raises:
        DataError: one is none.
    """
    wrong = next((label for label in labels if not 0 <= label < classes), None)
    if wrong is not None and classes:
        raise DataError(
            "A label is no class of the model.",
            where=origin,
            observed=wrong,
            expected=f"0 to {classes - 1}: the first output has {classes} classes",
            hint="Are these the labels of this data set, or numbers of another kind (a file's, a year's)?",
        )


_FORMS = (
    "an .npy, .npz, .json, .csv or .txt file, 'folders' (each class in a sub-folder), or 're:REGEX' whose"
    " first group finds the class number in a file name"
)
_NPZ_NAMES = ("y", "labels", "label", "targets")


class Labels:
    """The class of every row of the data.

    Args:
        source: None, a sequence of numbers (one for each row), a mapping from file name to number, a file of
            either, 'folders', or 're:REGEX'.
        folder: where the data lies, for 'folders'.

    Raises:
        DataError: the source is of no known form.
    """

    def __init__(self, source: object, folder: Path | None = None) -> None:
        self._rows: Sequence[int] | None = None
        self._named: Callable[[str], int] | None = None
        self._taken = 0
        self.known = source is not None
        if isinstance(source, str) and source.startswith("re:"):
            self._named = partial(_by_pattern, _compiled(source[3:]))
        elif isinstance(source, str) and source == "folders":
            self._named = partial(_by_folder, _classes(folder))
        elif source is not None:
            where, found = "the labels", source
            if isinstance(source, str | Path):
                where, found = str(Path(source)), _read(Path(source))
            if isinstance(found, Mapping):
                names = {Path(str(n)).as_posix(): _number(v, f"{where}, '{n}'") for n, v in found.items()}
                self._named = partial(_by_name, names)
            else:
                self._rows = [_number(value, where) for value in np.asarray(found).reshape(-1).tolist()]

    def of(self, origin: str, rows: int) -> list[int] | None:
        """The labels of the next item.

        Args:
            origin: the file that it came from.
            rows: how many there must be.

        Raises:
            DataError: there are none for it.
        """
        if self._named is not None:
            return [self._named(origin)] * rows
        if self._rows is None:
            return None
        found = list(self._rows[self._taken : self._taken + rows])
        self._taken += rows
        if len(found) < rows:
            raise DataError("There are fewer labels than rows of data.", observed=f"{len(self._rows)} labels")
        return found


def _read(path: Path) -> Any:
    """What a file holds: numbers for the rows, or a mapping from names."""
    if not path.is_file():
        raise DataError("The labels file does not exist.", where=path, expected=_FORMS)
    suffix = path.suffix.lower()
    if suffix in (".npy", ".npz"):
        return _array(path)
    if suffix == ".json":
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError("The labels file is not JSON.", where=path, observed=error) from error
    if suffix in (".csv", ".txt"):
        return _lines(path.read_text(encoding="utf-8-sig"))
    raise DataError("The labels are of no known form.", where=path, expected=_FORMS)


def _lines(text: str) -> list[str] | dict[str, str]:
    """'7' or 'name,7' (or 'name 7') on each line; one line of headings is skipped."""
    rows = [row for row in csv.reader(line.replace("\t", ",") for line in text.splitlines()) if row]
    split = [row if len(row) > 1 else row[0].rsplit(maxsplit=1) for row in rows]
    if split and not split[0][-1].strip().lstrip("-").isdigit():
        split = split[1:]
    if all(len(row) == 1 for row in split):
        return [row[0] for row in split]
    return {row[0].strip(): row[-1].strip() for row in split}


def _by_pattern(pattern: re.Pattern[str], origin: str) -> int:
    found = pattern.search(Path(origin).as_posix())
    if found is None:
        raise DataError("A file name does not show its label.", where=origin, expected=pattern.pattern)
    return _number(found[1], origin)


def _by_folder(classes: Mapping[str, int], origin: str) -> int:
    parts = Path(origin).parts
    if len(parts) < 2:
        raise DataError(
            "A file lies in no class folder.", where=origin, expected="CLASS/NAME.jpg", hint=_FORMS
        )
    return classes[parts[0]]


def _by_name(names: Mapping[str, int], origin: str) -> int:
    path = PurePosixPath(Path(origin).as_posix())
    for key in (path.as_posix(), path.name, path.with_suffix("").as_posix(), path.stem):
        if key in names:
            return names[key]
    raise DataError("A file has no label.", where=origin, hint="Add it to the labels, or remove it.")


def _compiled(text: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise DataError("The labels' pattern is not valid.", where=text, observed=error) from error
    if pattern.groups < 1:
        raise DataError("The labels' pattern has no group.", where=text, expected="for example re:^(\\d+)_")
    return pattern


def _classes(folder: Path | None) -> dict[str, int]:
    """Numbers for the sub-folders: their own, where all are numbers, else their place in natural order."""
    if folder is None or not folder.is_dir():
        raise DataError("Labels from folders need a folder of data.", observed=folder, expected=_FORMS)
    names = [p.name for p in sorted(folder.iterdir(), key=natural_key) if p.is_dir()]
    numbered = all(name.isdigit() for name in names)
    return {name: int(name) if numbered else number for number, name in enumerate(names)}


def _array(path: Path) -> Any:
    if path.suffix.lower() == ".npy":
        return load_npy(path, lambda header: None)
    names = list(npz_headers(path))
    chosen = next((name for name in _NPZ_NAMES if name in names), names[0] if len(names) == 1 else None)
    if chosen is None:
        raise DataError(
            "It is not clear which array holds the labels.",
            where=path,
            observed=", ".join(names),
            expected="one called " + ", ".join(_NPZ_NAMES),
        )
    with reading(path), np.load(path, allow_pickle=False) as file:
        return file[chosen]


def _number(value: object, where: str) -> int:
    try:
        number = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        number = None
    if number is None or (isinstance(value, float) and number != value):
        raise DataError("A label is not a class number.", where=where, observed=value, expected="0, 1, 2 …")
    return int(number)
