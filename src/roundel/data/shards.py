"""Samples in shards: runs of a fixed length, the same whoever works on them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from roundel.data.division import Division
from roundel.data.hashing import SampleDigest
from roundel.types import Sample

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
