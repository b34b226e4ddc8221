"""Samples in shards for workers, sent to them or read by them from files that they see, too; and digests."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from roundel.data.lint import SampleWatch
from roundel.data.samples import Division, Samples
from roundel.plain import from_plain, to_plain
from roundel.types import Array, Arrays, Sample
from roundel.work.checkpoints import as_array, as_tree

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
    digest = hashlib.blake2b(digest_size=DIGEST_SIZE)

    def block(data: bytes) -> None:
        # The length before it, so that no two samples write the same bytes.
        digest.update(len(data).to_bytes(8, "little") + data)

    header = {name: [str(array.dtype), list(array.shape)] for name, array in sorted(sample.items())}
    block(json.dumps(header).encode())
    for name in header:
        array = sample[name]
        if array.dtype.kind in "OUST":
            for value in array.reshape(-1).tolist():
                block(value if isinstance(value, bytes) else str(value).encode())
        else:
            native = array.astype(array.dtype.newbyteorder("<"), copy=False)
            digest.update(np.ascontiguousarray(native).reshape(-1).view(np.uint8).data)
    return digest.digest()


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
    passing = iter(samples)
    for number in itertools.count():
        part = [{n: np.array(a) for n, a in sample.items()} for sample in itertools.islice(passing, SIZE)]
        if not part:
            return
        digest = SampleDigest()
        for sample in part:
            digest.update(sample)
        yield Shard(number, number * SIZE, tuple(part), digest.hexdigest())


def long_shard(count: int) -> int:
    """Samples of a shard where results merge in any grouping: more than eight only where there are many.

    What a shard sends back is as large for a thousand samples as for eight, and one process merges it all.
    """
    return SIZE * max(1, -(-count // (SIZE * _MOST)))


_DIGESTS, _TOLD = "digests", "told"


class Reading:
    """In a worker: the samples of a shard, one at a time, and what the driver must know of them.

    Args:
        part: what was sent, or what is to be read.
    """

    def __init__(self, part: Shard) -> None:
        self._sent, self._digests = part.samples, bytearray()
        self._read = None if part.files is None else part.files.open()

    def __iter__(self) -> Iterator[Sample]:
        yield from self._sent
        for sample in self._read or ():
            self._digests += digest_of(sample)
            yield sample

    def told(self) -> Arrays:
        """What is known once all samples have passed; nothing of samples that the driver has sent."""
        if self._read is None:
            return {}
        digests = np.frombuffer(bytes(self._digests), np.uint8)
        seen = len(digests) // DIGEST_SIZE
        told = {"watch": to_plain(self._read.watch), "notes": self._read.notes, "seen": seen}
        return {_DIGESTS: digests, _TOLD: as_array(told)}


class Feed:
    """A pass over the data in shards, and what is known of it at the end: read here, and sent."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._samples, self._digest = samples, SampleDigest()

    @property
    def digest(self) -> str:
        """`SampleDigest` of all samples in order."""
        return self._digest.hexdigest()

    def shards(self, *, digests: bool, long: bool = False) -> Iterator[Shard]:
        """The parts; with `digests`, each can be told from one of other data.

        `long` ones are for results that merge exactly, in any grouping.
        """
        return shards(self._digest.watch(self._samples))

    def example(self, shard: Shard) -> Sample:
        """The first sample of a shard."""
        return shard.samples[0]

    def taken(self, shard: Shard, arrays: Mapping[str, Array]) -> int:
        """Take in what a worker tells of its samples; how many there were."""
        return len(shard.samples)

    def sample(self, shard: Shard, arrays: Mapping[str, Array], index: int) -> Sample:
        """One of a shard's samples that are kept."""
        return shard.samples[index - shard.first]

    def finish(self, seen: int) -> None:
        """All shards are done."""


class _ReadThere(Feed):
    """Read by the workers; what they saw is put together in the order of the shards."""

    def __init__(self, samples: Samples, division: Division) -> None:
        super().__init__(samples)
        self._source, self._division = samples, division
        self._watch = SampleWatch()
        self._notes: dict[str, None] = {}

    def shards(self, *, digests: bool, long: bool = False) -> Iterator[Shard]:
        count = len(self._division.files)
        size = long_shard(count) if long else SIZE
        for number, first in enumerate(range(0, count, size)):
            files = self._division.part(first, size)
            # By their digest these files can be told from later ones of their names.
            yield Shard(number, first, (), files.digest() if digests else "", files)

    def example(self, shard: Shard) -> Sample:
        return next(iter(self._division.part(shard.first, 1).open()))

    def taken(self, shard: Shard, arrays: Mapping[str, Array]) -> int:
        for digest in arrays[_DIGESTS].reshape(-1, DIGEST_SIZE):
            self._digest.add(digest.tobytes())
        told = as_tree(arrays[_TOLD])
        self._watch.merge(from_plain(SampleWatch, told["watch"]))
        self._notes |= dict.fromkeys(told["notes"])
        return int(told["seen"])

    def sample(self, shard: Shard, arrays: Mapping[str, Array], index: int) -> Sample:
        return {spec.name: arrays[f"in.{index}.{spec.name}"] for spec in self._division.inputs}

    def finish(self, seen: int) -> None:
        self._source.adopt(self._watch, seen, self._notes)


def feed_of(samples: Iterable[Sample], *, sees_files: bool) -> Feed:
    """The way that suits the data and the workers."""
    division = samples.division if isinstance(samples, Samples) and sees_files else None
    if isinstance(samples, Samples) and division is not None and division.files:
        return _ReadThere(samples, division)
    return Feed(samples)
