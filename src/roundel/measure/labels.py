"""The classes that rows of data are judged by, from whatever holds them."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from roundel.data.arrayfiles import load_npy, npz_headers, reading
from roundel.data.folders import natural_key
from roundel.errors import DataError

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
