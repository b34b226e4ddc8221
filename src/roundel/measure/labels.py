"""Labels: from a file, from file names, or from the sub-folders that the data lies in."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping, Sequence
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
        self._names: Mapping[str, int] | None = None
        self._pattern: re.Pattern[str] | None = None
        self._classes: dict[str, int] | None = None
        self._taken = 0
        self.known = source is not None
        if source is not None:
            self._open(source, folder)

    def of(self, origin: str, rows: int) -> list[int] | None:
        """The labels of the next item.

        Args:
            origin: the file that it came from.
            rows: how many there must be.

        Raises:
            DataError: there are none for it.
        """
        if not self.known:
            return None
        if self._rows is not None:
            found = list(self._rows[self._taken : self._taken + rows])
            self._taken += rows
            if len(found) < rows:
                raise DataError(
                    "There are fewer labels than rows of data.", observed=f"{len(self._rows)} labels"
                )
            return found
        return [self._by_name(origin)] * rows

    def _open(self, source: object, folder: Path | None) -> None:
        if isinstance(source, str) and source.startswith("re:"):
            self._pattern = _compiled(source[3:])
        elif isinstance(source, str) and source == "folders":
            self._classes = _classes(folder)
        elif isinstance(source, Mapping):
            self._names = _named(source, "the labels")
        elif isinstance(source, str | Path):
            self._read(Path(source))
        else:
            self._rows = _numbers(source, "the labels")

    def _read(self, path: Path) -> None:
        if not path.is_file():
            raise DataError("The labels file does not exist.", where=path, expected=_FORMS)
        suffix = path.suffix.lower()
        if suffix in (".npy", ".npz"):
            self._rows = _numbers(_array(path), str(path))
        elif suffix == ".json":
            try:
                tree = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise DataError("The labels file is not JSON.", where=path, observed=error) from error
            if isinstance(tree, dict):
                self._names = _named(tree, str(path))
            else:
                self._rows = _numbers(tree, str(path))
        elif suffix in (".csv", ".txt"):
            self._lines(path)
        else:
            raise DataError("The labels are of no known form.", where=path, expected=_FORMS)

    def _lines(self, path: Path) -> None:
        """'7' or 'name,7' (or 'name 7') on each line; one line of headings is skipped."""
        text = path.read_text(encoding="utf-8-sig")
        rows = [row for row in csv.reader(line.replace("\t", ",") for line in text.splitlines()) if row]
        split = [row if len(row) > 1 else row[0].rsplit(maxsplit=1) for row in rows]
        if split and not split[0][-1].strip().lstrip("-").isdigit():
            split = split[1:]
        if all(len(row) == 1 for row in split):
            self._rows = _numbers([row[0] for row in split], str(path))
        else:
            self._names = _named({row[0].strip(): row[-1].strip() for row in split}, str(path))

    def _by_name(self, origin: str) -> int:
        path = PurePosixPath(Path(origin).as_posix())
        if self._pattern is not None:
            found = self._pattern.search(path.as_posix())
            if found is None:
                raise DataError(
                    "A file name does not show its label.", where=origin, expected=self._pattern.pattern
                )
            return _number(found[1], origin)
        if self._classes is not None:
            if len(path.parts) < 2:
                raise DataError(
                    "A file lies in no class folder.", where=origin, expected="CLASS/NAME.jpg", hint=_FORMS
                )
            return self._classes[path.parts[0]]
        assert self._names is not None
        for key in (path.as_posix(), path.name, path.with_suffix("").as_posix(), path.stem):
            if key in self._names:
                return self._names[key]
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
    if all(name.isdigit() for name in names):
        return {name: int(name) for name in names}
    return {name: number for number, name in enumerate(names)}


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


def _named(table: Mapping[Any, Any], where: str) -> dict[str, int]:
    return {Path(str(name)).as_posix(): _number(value, f"{where}, '{name}'") for name, value in table.items()}


def _numbers(values: Any, where: str) -> list[int]:
    return [_number(value, where) for value in np.asarray(values).reshape(-1).tolist()]


def _number(value: object, where: str) -> int:
    try:
        number = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        number = None
    if number is None or (isinstance(value, float) and number != value):
        raise DataError("A label is not a class number.", where=where, observed=value, expected="0, 1, 2 …")
    return int(number)
