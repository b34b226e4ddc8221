"""Arrays that are kept for later: a few in memory, the rest in a temporary file.

The file is mapped only while somebody looks at an array, so that no more of it lies in memory than is in use.
"""

from __future__ import annotations

import mmap
import tempfile
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from roundel.errors import OutputError
from roundel.model.memory import budget
from roundel.types import Array, Sample

_ALIGNED = 64  # bytes; arrays begin where vector instructions like it


class _File:
    """A temporary file without a name that ends with its last user."""

    def __init__(self) -> None:
        try:
            self._file = tempfile.TemporaryFile(prefix="roundel-")  # noqa: SIM115
        except OSError as error:
            raise _full(error) from error
        self.end = 0
        weakref.finalize(self, self._file.close)

    def write(self, array: Array) -> int:
        """Append an array; where it begins."""
        start = -(-self.end // _ALIGNED) * _ALIGNED
        try:
            self._file.seek(start)
            self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            self._file.flush()
        except OSError as error:
            raise _full(error) from error
        self.end = start + array.nbytes
        return start

    def read(self, start: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Map an array; the mapping ends with it."""
        page = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        count = int(np.prod(shape, dtype=np.int64))
        size = start - page + count * dtype.itemsize
        mapped = mmap.mmap(self._file.fileno(), size, access=mmap.ACCESS_READ, offset=page)
        return np.frombuffer(mapped, dtype, count, offset=start - page).reshape(shape)


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """One array, wherever it lies."""

    place: Array | tuple[_File, int, tuple[int, ...], np.dtype[Any]]

    def get(self) -> Array:
        """Its content, not to be changed."""
        if not isinstance(self.place, tuple):
            return self.place
        file, start, shape, dtype = self.place
        return file.read(start, shape, dtype)

    @property
    def in_memory(self) -> int:
        """Bytes that it takes there."""
        return self.place.nbytes if isinstance(self.place, np.ndarray) else 0


class Spool:
    """Takes arrays in, from any thread: into memory while there is room, then into a file.

    Args:
        room: bytes that may stay in memory; what the run's budget gives when not given.
    """

    def __init__(self, room: int | None = None) -> None:
        self._room = budget().held if room is None else room
        self._lock = threading.Lock()
        self._file: _File | None = None

    def keep(self, array: Array) -> Kept:
        """Keep an array; it may not change afterwards.

        Raises:
            OutputError: the disk is full.
        """
        if not isinstance(array, np.ndarray):  # a sequence or an optional, as some outputs are
            return Kept(array)
        with self._lock:
            if array.nbytes <= self._room or array.dtype.hasobject or array.size == 0:
                self._room -= array.nbytes
                return Kept(array)
            if self._file is None:
                self._file = _File()
            return Kept((self._file, self._file.write(array), array.shape, array.dtype))


class KeptArrays(Sequence[Array]):
    """A list of arrays, each of which is there while it is looked at."""

    def __init__(self, kept: Iterable[Kept]) -> None:
        self._kept = tuple(kept)

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, index: int) -> Array: ...
    @overload
    def __getitem__(self, index: slice) -> KeptArrays: ...
    def __getitem__(self, index: int | slice) -> Array | KeptArrays:
        found = self._kept[index]
        return found.get() if isinstance(found, Kept) else KeptArrays(found)

    @property
    def in_memory(self) -> int:
        """Bytes that they take there."""
        return sum(kept.in_memory for kept in self._kept)


class KeptSamples(Sequence[Sample]):
    """A list of samples, each of which is there while it is looked at.

    Args:
        samples: those to begin with.
        room: as in `Spool`.
    """

    def __init__(self, samples: Iterable[Sample] = (), room: int | None = None) -> None:
        self._spool = Spool(room)
        self._kept: list[dict[str, Kept]] = []
        for sample in samples:
            self.append(sample)

    def append(self, sample: Sample) -> None:
        """Keep one more; its arrays may not change afterwards."""
        self._kept.append({name: self._spool.keep(array) for name, array in sample.items()})

    def column(self, name: str) -> KeptArrays:
        """One array of every sample."""
        return KeptArrays(kept[name] for kept in self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> KeptSamples: ...
    def __getitem__(self, index: int | slice) -> Sample | KeptSamples:
        if isinstance(index, slice):
            part = KeptSamples()
            part._kept = self._kept[index]
            return part
        return {name: kept.get() for name, kept in self._kept[index].items()}


def _full(error: OSError) -> OutputError:
    return OutputError(
        "What does not fit into memory could not be written to a temporary file.",
        where=tempfile.gettempdir(),  # or TMPDIR
        observed=error.strerror or error,
        hint="Free some space, let TMPDIR name another folder, or allow more memory (--max-memory).",
    )
