"""Samples that still hold an input which has become a constant: it is checked, and left out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from roundel.data import arrays
from roundel.data.arrayfiles import load_npz, npz_headers
from roundel.data.folders import files_below
from roundel.errors import DataError
from roundel.types import Array

Constants = Mapping[str, Array]
Notes = dict[str, None]


def without_constants(data: object, constants: Constants, notes: Notes) -> object:
    """The same data, without arrays for inputs that are constants.

    Args:
        data: whatever `open_samples` takes.
        constants: by the name that the input had.
        notes: receives a sentence for each constant that was met; complete when the data has been read.

    Raises:
        DataError: an array differs from the constant; here, or when the sample that has it is read.
    """
    if not constants:
        return data
    if isinstance(data, str | os.PathLike):
        _check_files(Path(data), constants, notes)
        return data  # of files, only the arrays that feed inputs are read
    if isinstance(data, Mapping):
        return _stripped(data, constants, notes, "the data")
    if callable(getattr(data, "get_next", None)):
        return _Reader(data, constants, notes)
    if isinstance(data, list | tuple) and any(isinstance(one, Mapping) for one in data):
        return [_stripped(one, constants, notes, f"sample {number}") for number, one in enumerate(data)]
    if isinstance(data, Iterable) and not arrays.is_array(data) and not isinstance(data, list | tuple):
        again = _Again(data, constants, notes)
        return iter(again) if hasattr(data, "__next__") else again
    return data


def _stripped(value: object, constants: Constants, notes: Notes, where: str) -> object:
    """A mapping without its constants; anything else as it is, since it names no inputs."""
    if not isinstance(value, Mapping) or constants.keys().isdisjoint(value):
        return value
    for name in constants.keys() & value.keys():
        _check(name, np.asarray(value[name]), constants[name], where)
        notes[_told(name)] = None
    return {name: array for name, array in value.items() if name not in constants}


def _check(name: str, array: Array, constant: Array, where: str) -> None:
    """Whether an array is the constant, or the constant again and again."""
    rows = array.reshape(-1, constant.size) if constant.size and array.size % constant.size == 0 else None
    if rows is None or not bool((rows == constant.reshape(1, -1)).all()):
        raise DataError(
            f"A sample has another value for input '{name}', which is fixed",
            where=where,
            observed=str(np.unique(array)[:8].tolist()),
            expected=str(constant.tolist())[:200],
            hint="Leave the array out of the samples, or fix the input to the value that they have.",
        )


def _told(name: str) -> str:
    return f"the samples' arrays for '{name}' equal the value it is fixed to, and are not needed"


def _check_files(path: Path, constants: Constants, notes: Notes) -> None:
    path = path.expanduser()
    if path.is_dir():
        files = [path / file for file in files_below(path) if file.suffix.lower() == ".npz"]
    else:
        files = [path] if path.suffix.lower() == ".npz" and path.exists() else []
    for file in files:
        held = constants.keys() & npz_headers(file).keys()
        for name, array in load_npz(file, held).items() if held else ():
            _check(name, array, constants[name], str(file))
            notes[_told(name)] = None


class _Again:
    """An iterable of samples without the constants."""

    def __init__(self, data: Iterable[object], constants: Constants, notes: Notes) -> None:
        self._data, self._told = data, (constants, notes)

    def __iter__(self) -> Iterator[object]:
        for number, value in enumerate(self._data):
            yield _stripped(value, *self._told, f"sample {number}")

    def __len__(self) -> int:
        return len(self._data)  # type: ignore[arg-type]  # a TypeError where it has none, as ever


class _Reader:
    """A calibration data reader without the constants."""

    def __init__(self, reader: Any, constants: Constants, notes: Notes) -> None:
        self._reader, self._told, self._count = reader, (constants, notes), 0
        if callable(getattr(reader, "rewind", None)):
            self.rewind = reader.rewind

    def get_next(self) -> object:
        value = self._reader.get_next()
        self._count += 1
        return None if value is None else _stripped(value, *self._told, f"sample {self._count - 1}")

    def __len__(self) -> int:
        return len(self._reader)
