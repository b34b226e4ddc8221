"""How workers get their samples: sent to them, or read by them from files that they see, too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from roundel.data.lint import SampleWatch
from roundel.data.samples import Samples
from roundel.data.shards import (
    DIGEST_SIZE,
    SIZE,
    Division,
    SampleDigest,
    Shard,
    digest_of,
    file_shards,
    long_shard,
    shards,
)
from roundel.types import Arrays, Sample
from roundel.work.checkpoints import as_array, as_tree

_DIGESTS, _TOLD = "digests", "told"


class Feed(Protocol):
    """A pass over the data in shards, and what is known of it at the end."""

    @property
    def digest(self) -> str:
        """`SampleDigest` of all samples in order."""

    def shards(self, *, digests: bool, long: bool = False) -> Iterator[Shard]:
        """The parts; with `digests`, each can be told from one of other data.

        `long` ones are for results that merge exactly, in any grouping.
        """

    def example(self, shard: Shard) -> Sample:
        """The first sample of a shard."""

    def taken(self, shard: Shard, arrays: Mapping[str, NDArray[Any]]) -> int:
        """Take in what a worker tells of its samples; how many there were."""

    def sample(self, shard: Shard, arrays: Mapping[str, NDArray[Any]], index: int) -> Sample:
        """One of a shard's samples that are kept."""

    def finish(self, seen: int) -> None:
        """All shards are done."""


def feed_of(samples: Iterable[Sample], *, sees_files: bool) -> Feed:
    """The way that suits the data and the workers."""
    division = samples.division if isinstance(samples, Samples) and sees_files else None
    if isinstance(samples, Samples) and division is not None and division.files:
        return _Read(samples, division)
    return _Sent(samples)


class Reading:
    """In a worker: the samples of some files, one at a time, and what the driver must know of them.

    Args:
        files: to read.
    """

    def __init__(self, files: Division) -> None:
        self._samples, self._digests = files.open(), bytearray()

    def __iter__(self) -> Iterator[Sample]:
        for sample in self._samples:
            self._digests += digest_of(sample)
            yield sample

    def told(self) -> Arrays:
        """What is known once all samples have passed."""
        digests = np.frombuffer(bytes(self._digests), np.uint8)
        seen = len(digests) // DIGEST_SIZE
        told = {"watch": self._samples.watch.state(), "notes": self._samples.notes, "seen": seen}
        return {_DIGESTS: digests, _TOLD: as_array(told)}


class _Sent:
    """Read here, and sent."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._samples, self._digest = samples, SampleDigest()

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def shards(self, *, digests: bool, long: bool = False) -> Iterator[Shard]:
        return shards(self._digest.watch(self._samples))

    def example(self, shard: Shard) -> Sample:
        return shard.samples[0]

    def taken(self, shard: Shard, arrays: Mapping[str, NDArray[Any]]) -> int:
        return len(shard.samples)

    def sample(self, shard: Shard, arrays: Mapping[str, NDArray[Any]], index: int) -> Sample:
        return shard.samples[index - shard.first]

    def finish(self, seen: int) -> None:
        pass


class _Read:
    """Read by the workers; what they saw is put together in the order of the shards."""

    def __init__(self, samples: Samples, division: Division) -> None:
        self._samples, self._division = samples, division
        self._digest, self._watch = SampleDigest(), SampleWatch()
        self._notes: dict[str, None] = {}
        self._names = [spec.name for spec in division.inputs]

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def shards(self, *, digests: bool, long: bool = False) -> Iterator[Shard]:
        size = long_shard(len(self._division.files)) if long else SIZE
        return file_shards(self._division, size, digests=digests)

    def example(self, shard: Shard) -> Sample:
        return next(iter(self._division.part(shard.first, 1).open()))

    def taken(self, shard: Shard, arrays: Mapping[str, NDArray[Any]]) -> int:
        for digest in arrays[_DIGESTS].reshape(-1, DIGEST_SIZE):
            self._digest.add(digest.tobytes())
        told = as_tree(arrays[_TOLD])
        self._watch.merge(SampleWatch.from_state(told["watch"]))
        self._notes |= dict.fromkeys(told["notes"])
        return int(told["seen"])

    def sample(self, shard: Shard, arrays: Mapping[str, NDArray[Any]], index: int) -> Sample:
        return {name: arrays[f"in.{index}.{name}"] for name in self._names}

    def finish(self, seen: int) -> None:
        self._samples.adopt(self._watch, seen, self._notes)
