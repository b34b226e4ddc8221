"""Data that workers can read for themselves, piece by piece: files on a disk that all of them see."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundel.types import InputSpec

if TYPE_CHECKING:
    from roundel.data.images import ImagePlan
    from roundel.data.samples import Item, Samples
import json
from collections.abc import Iterable, Iterator

import numpy as np

from roundel.data.arrays import Array
from roundel.types import Sample

Reader = Callable[[Path], Any]


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """A folder whose files are one sample each; it travels by pickle.

    Attributes:
        kind: what it is, in words.
        folder: where the files are.
        files: relative to it, in the order of the samples.
        read: one file's content.
        inputs: what the model takes.
        plan: how raw pixels become model input, where `read` does not do that.
        first: the position of the first file among all samples.
    """

    kind: str
    folder: Path
    files: Sequence[Path]
    read: Reader
    inputs: tuple[InputSpec, ...]
    plan: ImagePlan | None = None
    first: int = 0

    def part(self, first: int, count: int) -> Division:
        """Some of the files."""
        files = tuple(self.files[first : first + count])
        return Division(self.kind, self.folder, files, self.read, self.inputs, self.plan, self.first + first)

    def open(self) -> Samples:
        """The samples of these files, checked like all others."""
        from roundel.data.samples import Item, Samples, Source

        def items() -> Generator[Item, None, None]:
            for file in self.files:
                yield Item(self.read(self.folder / file), str(file))

        source = Source(self.kind, items, count=len(self.files))
        return Samples(source, self.inputs, plan=self.plan, first=self.first)

    def digest(self) -> str:
        """Of the files' names, sizes and times of change; their content is not read."""
        digest = hashlib.blake2b(digest_size=16)
        for file in self.files:
            found = (self.folder / file).stat()
            digest.update(f"{file} {found.st_size} {found.st_mtime_ns}\n".encode())
        return digest.hexdigest()


DIGEST_SIZE = 32
"""Bytes of a digest."""


class SampleDigest:
    """A digest of the samples' own digests, in their order.

    The order of the inputs inside one sample does not count; the order of the samples does.
    """

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=DIGEST_SIZE)

    def update(self, sample: Sample) -> None:
        """Take one sample in."""
        self.add(digest_of(sample))

    def add(self, digest: bytes) -> None:
        """Take in a sample that somebody else has read, by its digest."""
        self._hash.update(digest)

    def hexdigest(self) -> str:
        """The digest of everything taken in so far."""
        return self._hash.hexdigest()

    def watch(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Yield the samples unchanged and take each one in before it leaves."""
        for sample in samples:
            self.update(sample)
            yield sample


def digest_of(sample: Sample) -> bytes:
    """A blake2b digest over names, types, shapes and bytes of one sample."""
    one = _One()
    header = {name: [str(array.dtype), list(array.shape)] for name, array in sorted(sample.items())}
    # The header has a length before it, so that no two samples write the same bytes.
    one.block(json.dumps(header).encode())
    for name in header:
        one.values(sample[name])
    return one.digest()


class _One:
    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=DIGEST_SIZE)

    def digest(self) -> bytes:
        return self._hash.digest()

    def block(self, data: bytes) -> None:
        self._hash.update(len(data).to_bytes(8, "little"))
        self._hash.update(data)

    def values(self, array: Array) -> None:
        if array.dtype.kind in "OUST":
            for value in array.reshape(-1).tolist():
                self.block(value if isinstance(value, bytes) else str(value).encode())
            return
        native = array.astype(array.dtype.newbyteorder("<"), copy=False)
        self._hash.update(np.ascontiguousarray(native).reshape(-1).view(np.uint8).data)


SIZE = 8
"""Samples of a shard, as a rule. Float sums run within a shard first and then over the shards, always."""

_MOST = 2048  # shards that one process merges in seconds


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """Samples that are worked on together.

    Attributes:
        number: its place.
        first: the position of its first sample.
        samples: its content; empty where the worker reads it.
        digest: of it.
        files: what the worker reads.
    """

    number: int
    first: int
    samples: tuple[Sample, ...]
    digest: str
    files: Division | None = None


def shards(samples: Iterable[Sample]) -> Iterator[Shard]:
    """The samples in shards; they are copied, since a reader may reuse its arrays."""
    waiting: list[Sample] = []
    number = 0
    for sample in samples:
        waiting.append({name: np.array(array) for name, array in sample.items()})
        if len(waiting) == SIZE:
            yield _shard(number, waiting)
            waiting, number = [], number + 1
    if waiting:
        yield _shard(number, waiting)


def long_shard(count: int) -> int:
    """Samples of a shard where results merge in any grouping: more than eight only where there are many.

    What a shard sends back is as large for a thousand samples as for eight, and one process merges it all.
    """
    return SIZE * max(1, -(-count // (SIZE * _MOST)))


def file_shards(division: Division, size: int, *, digests: bool) -> Iterator[Shard]:
    """Shards that name their files; with `digests`, also whether these have changed since."""
    for number, first in enumerate(range(0, len(division.files), size)):
        files = division.part(first, size)
        yield Shard(number, first, (), files.digest() if digests else "", files)


def _shard(number: int, samples: list[Sample]) -> Shard:
    digest = SampleDigest()
    for sample in samples:
        digest.update(sample)
    return Shard(number, number * SIZE, tuple(samples), digest.hexdigest())
