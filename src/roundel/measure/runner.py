"""Runs both models side by side over the samples, within a bound on memory."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from threading import BoundedSemaphore
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from roundel.calibrate.runner import grouped, run_session, tensor_bytes
from roundel.data.shards import SIZE, Reading, Shard, feed_of
from roundel.errors import DataError
from roundel.measure.match import cut_to
from roundel.measure.points import Point, channel_axis
from roundel.measure.reference import Factors
from roundel.measure.shadow import Extended, Fetch
from roundel.measure.sums import Gap, PointArrays, TensorSums, measure
from roundel.measure.types import TensorStorage
from roundel.model.files import Portable
from roundel.model.graph import fingerprint
from roundel.model.memory import collector_paused
from roundel.model.session import open_session
from roundel.numerics.histogram import Histogram
from roundel.numerics.metrics import Closeness
from roundel.qdq.names import QUARK
from roundel.types import Arrays, Sample
from roundel.work.checkpoints import as_array, as_tree
from roundel.work.executors import Work, mapped

MAX_LIVE_BYTES = 1_500_000_000
"""Tensors of all runs in flight; a sample that needs more runs once for each group of points."""

_COPIES = 4  # float, shown, shadow, stored
_STEPS = ("float", "quantized", "figures")


@dataclass(frozen=True, slots=True)
class RunMark:
    """What a run must know of a point.

    Attributes:
        name: in the float model.
        output: whether it is a graph output.
        op: the operator of its layer.
        sources: names of the points that the layer reads.
    """

    name: str
    output: bool
    op: str
    sources: tuple[str, ...]

    @staticmethod
    def of(point: Point) -> RunMark:
        """The mark of a point."""
        return RunMark(point.name, point.place == "output", point.op, point.sources)


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """Both models and what is to be compared.

    Attributes:
        reference: the float model.
        extended: the quantized model with its shadow.
        points: marks of the tensors.
        storages: how each is stored, by name; a point that stays float has none.
        factors: what float channels are multiplied by, by name.
    """

    reference: ir.Model
    extended: Extended
    points: Sequence[RunMark]
    storages: Mapping[str, TensorStorage]
    factors: Mapping[str, Factors]


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What the data shows.

    Attributes:
        sums: of each point, by name.
        samples: how many there were.
        mismatched: points whose shapes differ between the models, with both shapes.
        seconds: inside ONNX Runtime (`float`, `quantized`) and for the figures, added up over threads.
    """

    sums: dict[str, TensorSums]
    samples: int
    mismatched: dict[str, str]
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    points: Sequence[RunMark]
    float_names: list[str]
    float_session: ort.InferenceSession | None  # None where the graph inputs are all that is needed
    quantized_sessions: Sequence[tuple[ort.InferenceSession, list[str]]]


@dataclass(slots=True, eq=False)
class Tally:
    """What some samples show: one, a shard, or all.

    Attributes:
        sums: of each point, by name.
        mismatched: points whose shapes differ between the models, with both shapes.
        seconds: inside ONNX Runtime (`float`, `quantized`) and for the figures, added up over threads.
    """

    sums: dict[str, TensorSums] = field(default_factory=dict)
    mismatched: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_STEPS, 0.0))

    def merge(self, more: Tally) -> None:
        """Add samples behind these."""
        for name, sums in more.sums.items():
            self.sums.setdefault(name, TensorSums()).merge(sums)
        self.mismatched |= more.mismatched
        for step, spent in more.seconds.items():
            self.seconds[step] += spent


class Bench:
    """Both models, ready to run.

    Args:
        subject: the models and the points.
        first: a sample that tells how large the tensors are.
        cores: how many threads may work in all.
        samples: the most samples that can run at once.
    """

    def __init__(self, subject: Subject, first: Sample, *, cores: int, samples: int) -> None:
        self._subject = subject
        known = {point.name: point for point in subject.points}
        single = tensor_bytes(subject.reference, list(known), first)
        sizes = {name: _COPIES * max(size, 1) for name, size in single.items()}
        parts = grouped(list(known), sizes, MAX_LIVE_BYTES)
        live = max(sum(sizes[name] for name in part) for part in parts)
        self.workers = max(1, min(samples, MAX_LIVE_BYTES // max(live, 1)))
        # Figures are many short calls: threads that make them side by side wait for Python, one for another.
        self._turns = BoundedSemaphore(max(1, self.workers // 2))
        with collector_paused():
            threads = max(1, cores // self.workers)
            self._groups = [_group(subject, [known[name] for name in part], threads) for part in parts]

    def sample(self, sample: Sample, index: int) -> Tally:
        """Compare every point of one sample. Safe to call from several threads.

        Raises:
            DataError: the sample does not fit.
            ModelError: ONNX Runtime cannot run a model.
        """
        return _sample(self._subject, self._groups, self._turns, sample, index)


def run_both(
    subject: Subject, samples: Iterable[Sample], progress: Callable[[int], None], cores: int
) -> Outcome:
    """Compare every point over every sample, in this process.

    Several samples run at once, one to a core. Sums run over the samples of a shard, in their order, and then
    over the shards: the result does not depend on how many run at once, or on how many machines.

    Raises:
        DataError: there are no samples, or one does not fit.
        ModelError: ONNX Runtime cannot run a model.
    """
    iterator = enumerate(samples)
    ahead = list(itertools.islice(iterator, cores))
    if not ahead:
        raise nothing()
    bench = Bench(subject, ahead[0][1], cores=cores, samples=len(ahead))
    total, shard, done = Tally(), Tally(), 0
    for result in _in_order(bench, itertools.chain(ahead, iterator)):
        shard.merge(result)
        done += 1
        if done % SIZE == 0:
            total.merge(shard)
            shard = Tally()
        progress(done)
    total.merge(shard)
    return outcome(subject, total, done)


def outcome(subject: Subject, total: Tally, samples: int) -> Outcome:
    """What all samples show together."""
    sums = {point.name: total.sums.get(point.name) or TensorSums() for point in subject.points}
    return Outcome(sums, samples, total.mismatched, total.seconds)


def nothing() -> DataError:
    """The error for data without samples."""
    return DataError("There are no samples.", hint="Give at least one; 32 are plenty.")


def _in_order(bench: Bench, samples: Iterator[tuple[int, Sample]]) -> Iterator[Tally]:
    with ThreadPoolExecutor(bench.workers, thread_name_prefix="roundel-compare") as pool:
        waiting: deque[Future[Tally]] = deque()
        try:
            for index, sample in samples:
                if len(waiting) >= bench.workers:
                    yield waiting.popleft().result()
                waiting.append(pool.submit(bench.sample, dict(sample), index))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _sample(
    subject: Subject, groups: Sequence[_Group], turns: BoundedSemaphore, sample: Sample, index: int
) -> Tally:
    one = Tally()
    for group in groups:
        started = time.perf_counter()
        floats = {n: a for n, a in sample.items() if n in group.float_names}
        wanted = [n for n in group.float_names if n not in floats]
        if group.float_session is not None:
            floats |= run_session(group.float_session, wanted, sample, index)
        for name in floats:
            factors = subject.factors.get(name)
            if factors is not None:
                floats[name] = factors.apply(floats[name])
        halfway = time.perf_counter()
        fetches = subject.extended.fetches
        feed = {**sample, **{fetches[n].feed: a for n, a in floats.items()}}
        results: dict[str, NDArray[Any]] = {}
        for session, outputs in group.quantized_sessions:
            needed = {i.name for i in session.get_inputs()}
            results |= run_session(session, outputs, {n: a for n, a in feed.items() if n in needed}, index)
        one.seconds["float"] += halfway - started
        one.seconds["quantized"] += time.perf_counter() - halfway
        with turns:
            finished = time.perf_counter()
            for point in group.points:
                _figures(subject, point, floats[point.name], results, one)
            one.seconds["figures"] += time.perf_counter() - finished
    return one


def _figures(
    subject: Subject, point: RunMark, floats: NDArray[Any], results: Mapping[str, NDArray[Any]], one: Tally
) -> None:
    fetch = subject.extended.fetches[point.name]
    shown = results[fetch.shown]
    if shown.shape != floats.shape:
        one.mismatched[point.name] = f"shape {list(floats.shape)} in float, {list(shown.shape)} in quantized"
        return
    arrays = PointArrays(
        float=floats,
        shown=shown,
        shadow=None if fetch.shadow is None else results[fetch.shadow],
        stored=None if fetch.stored is None else results[fetch.stored],
    )
    axis = channel_axis(point.op, floats.ndim)
    storage = subject.storages.get(point.name)
    one.sums[point.name] = measure(arrays, axis, storage, classes=point.output)


def _group(subject: Subject, points: Sequence[RunMark], threads: int) -> _Group:
    fetches = subject.extended.fetches
    known = {point.name: point for point in subject.points}
    names = dict.fromkeys(name for p in points for name in (p.name, *p.sources) if name in known)
    given = {str(value.name) for value in subject.reference.graph.inputs}
    wanted = [name for name in names if name not in given]
    reference = cut_to(subject.reference, wanted) if wanted else None
    spare = {fetch.feed for fetch in fetches.values()} - {fetches[name].feed for name in names}
    sessions = []
    for outputs in _parts(subject.extended.model, [fetches[p.name] for p in points]):
        part = cut_to(subject.extended.model, outputs, drop_inputs=spare)
        sessions.append((open_session(part, threads=threads, simulate=True), outputs))
    return _Group(
        points,
        list(names),
        None if reference is None else open_session(reference, threads=threads),
        sessions,
    )


def _parts(model: ir.Model, fetches: Sequence[Fetch]) -> list[list[str]]:
    """What each session computes: one for all, unless AMD's operators make the graph long.

    Their bodies have dozens of nodes each, and ONNX Runtime's time to load grows with the square of all.
    """
    kinds = [
        [fetch.shown for fetch in fetches],
        [fetch.shadow for fetch in fetches if fetch.shadow is not None],
        [fetch.stored for fetch in fetches if fetch.stored is not None],
    ]
    if not any(node.domain == QUARK for node in model.graph):
        kinds = [[name for kind in kinds for name in kind]]
    return [list(dict.fromkeys(kind)) for kind in kinds if kind]


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
    points: tuple[RunMark, ...]
    storages: dict[str, TensorStorage]
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
