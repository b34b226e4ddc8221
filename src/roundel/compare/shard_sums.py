"""A comparison in shards: in other processes, on other machines, or with a memory of what is done."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundel.checkpoints.plain import as_array, as_tree
from roundel.compare.measure import Gap, TensorSums
from roundel.compare.rescaling import Factors
from roundel.compare.runner import Bench, Mark, Outcome, Subject, Tally, nothing, outcome
from roundel.compare.shadow import Extended, Fetch
from roundel.compare.types import Storage
from roundel.data.feeding import Reading, feed_of
from roundel.data.shards import Shard
from roundel.executors import Work, mapped
from roundel.model.graph import fingerprint
from roundel.model.portable import Portable
from roundel.numerics.histogram import Histogram
from roundel.numerics.metrics import Closeness
from roundel.types import Arrays, Sample

_FACTS = "facts"
_GAPS = ("total", "introduced", "inherited", "rounding")
_SUMS = ("signal", "noise", "cross", "other", "worst")
_COUNTS = ("saturated", "count", "same_top", "rows")


def compare_shards(
    subject: Subject, samples: Iterable[Sample], progress: Callable[[int], None], work: Work
) -> Outcome:
    """As `run_both`, to the bit, wherever the shards are worked on.

    Raises:
        DataError: there are no samples, one does not fit, or the checkpoint is of another run.
        ModelError: ONNX Runtime cannot run a model.
    """
    feed = feed_of(samples, sees_files=work.sees_files)
    pieces: Iterator[Shard] = feed.shards(digests=work.store is not None)
    head = next(pieces, None)
    if head is None:
        raise nothing()
    task = _Task.of(subject, feed.example(head))
    memory = None if work.store is None else work.memory("compare", _key(subject))
    total, done = Tally(), 0
    for shard, arrays in mapped(work, task, chain([head], pieces), memory):
        total.merge(unpacked(arrays))
        done += feed.taken(shard, arrays)
        progress(done)
    feed.finish(done)
    return outcome(subject, total, done)


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    reference: Portable
    extended: Portable
    fetches: dict[str, Fetch]
    points: tuple[Mark, ...]
    storages: dict[str, Storage]
    factors: dict[str, Factors]
    first: Sample

    @staticmethod
    def of(subject: Subject, first: Sample) -> _Task:
        return _Task(
            Portable.of(subject.reference),
            Portable.of(subject.extended.model),
            dict(subject.extended.fetches),
            tuple(subject.points),
            dict(subject.storages),
            dict(subject.factors),
            first,
        )

    def open(self, cores: int) -> _Opened:
        extended = Extended(self.extended.model(), self.fetches)
        subject = Subject(self.reference.model(), extended, self.points, self.storages, self.factors)
        return _Opened(Bench(subject, self.first, cores=cores, samples=cores))


@dataclass(frozen=True, slots=True, eq=False)
class _Opened:
    bench: Bench

    @property
    def parallel(self) -> int:
        return self.bench.workers

    def __call__(self, part: Shard) -> Arrays:
        tally = Tally()
        reading = None if part.files is None else Reading(part.files)
        for index, sample in enumerate(reading or part.samples, part.first):
            tally.merge(self.bench.sample(sample, index))
        return packed(tally) | (reading.told() if reading is not None else {})


def packed(tally: Tally) -> Arrays:
    """A shard's sums as plain arrays."""
    arrays: Arrays = {}
    for number, sums in enumerate(tally.sums.values()):
        arrays |= {f"{number}.{key}": array for key, array in _arrays(sums).items()}
    facts = {"names": list(tally.sums), "mismatched": tally.mismatched, "seconds": tally.seconds}
    return {**arrays, _FACTS: as_array(facts)}


def unpacked(arrays: Mapping[str, NDArray[Any]]) -> Tally:
    """The inverse of `packed`."""
    facts = as_tree(arrays[_FACTS])
    by_point: dict[str, Arrays] = {}
    for key, array in arrays.items():
        number, _, field = key.partition(".")
        by_point.setdefault(number, {})[field] = array
    sums = {name: _sums(by_point[str(number)]) for number, name in enumerate(facts["names"])}
    return Tally(sums, facts["mismatched"], facts["seconds"])


def _arrays(sums: TensorSums) -> Arrays:
    gaps: Sequence[Gap] = [getattr(sums, name) for name in _GAPS]
    histogram = sums.histogram
    used = np.flatnonzero(histogram.counts)
    first, last = (int(used[0]), int(used[-1]) + 1) if used.size else (0, 0)
    known = histogram.exponent is not None
    return {
        "gaps": np.array([[getattr(gap.sums, name) for name in _SUMS] for gap in gaps], np.float64),
        "gap_counts": np.array([gap.sums.count for gap in gaps], np.int64),
        **{f"noise_{name}": gap.noise for name, gap in zip(_GAPS, gaps, strict=True)},
        "signal": sums.signal,
        "ends": np.array([sums.low, sums.high], np.float64),
        "counts": np.array([getattr(sums, name) for name in _COUNTS], np.int64),
        "shape": np.array(sums.shape, np.int64),
        "broken": np.array(sums.broken),
        "bins": histogram.counts[first:last].copy(),
        "binning": np.array([first, histogram.zeros, known, histogram.exponent or 0], np.int64),
    }


def _sums(arrays: Mapping[str, NDArray[Any]]) -> TensorSums:
    sums = TensorSums(shape=tuple(arrays["shape"].tolist()), signal=arrays["signal"])
    for place, name in enumerate(_GAPS):
        numbers = dict(zip(_SUMS, arrays["gaps"][place].tolist(), strict=True))
        known = Closeness(**numbers, count=int(arrays["gap_counts"][place]))
        setattr(sums, name, Gap(known, arrays[f"noise_{name}"]))
    sums.low, sums.high = arrays["ends"].tolist()
    for place, name in enumerate(_COUNTS):
        setattr(sums, name, int(arrays["counts"][place]))
    sums.broken = bool(arrays["broken"])
    first, zeros, wide, exponent = arrays["binning"].tolist()
    histogram = Histogram()
    histogram.counts[first : first + arrays["bins"].size] = arrays["bins"]
    histogram.zeros, histogram.exponent = zeros, exponent if wide else None
    sums.histogram = histogram
    return sums


def _key(subject: Subject) -> dict[str, str]:
    points = hashlib.blake2b(repr(tuple(subject.points)).encode(), digest_size=16)
    for name, factors in sorted(subject.factors.items()):
        points.update(name.encode() + factors.values.tobytes())
    return {
        "float model": fingerprint(subject.reference),
        "quantized model": fingerprint(subject.extended.model),
        "set of tensors": points.hexdigest(),
    }
