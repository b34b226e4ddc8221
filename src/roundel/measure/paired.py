"""Both models side by side over the samples, within a bound on memory; sums that merge over shards."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import BoundedSemaphore

import onnxruntime as ort

from roundel.calibrate.runner import grouped, run_session, tensor_bytes
from roundel.data.shards import SIZE, Reading, Shard, feed_of
from roundel.errors import DataError
from roundel.measure.points import Fetch, Point, output_channel_axis
from roundel.measure.reference import Factors, cut_to
from roundel.measure.runner import Travelling
from roundel.measure.sums import TensorSums, measure
from roundel.measure.types import TensorStorage
from roundel.model.graph import fingerprint
from roundel.model.memory import collector_paused
from roundel.model.session import open_session
from roundel.numerics.metrics import Closeness
from roundel.plan.float_parts import Joint, paired_parts
from roundel.qdq.nodes import QUARK
from roundel.types import Array, Arrays, Sample
from roundel.work.checkpoints import as_array, as_tree
from roundel.work.executors import Work, mapped

MAX_LIVE_BYTES = 1_500_000_000
"""Tensors of all runs in flight; a sample that needs more runs once for each group of points."""

_COPIES = 4  # float, shown, shadow, stored


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """Both models and what is to be compared.

    Attributes:
        reference: the float model.
        extended: the quantized model with its shadow.
        fetches: where the latter gives each point's tensors, by the point's name.
        points: the tensors.
        storages: how each is stored, by name; a point that stays float has none.
        factors: what float channels are multiplied by, by name.
        joints: float outputs of which each part is compared by itself: boxes and scores, say.
    """

    reference: Travelling
    extended: Travelling
    fetches: Mapping[str, Fetch]
    points: Sequence[Point]
    storages: Mapping[str, TensorStorage]
    factors: Mapping[str, Factors]
    joints: Mapping[str, Joint] = field(default_factory=dict)

    def key(self) -> dict[str, str]:
        """What the sums depend on besides the data."""
        points = hashlib.blake2b(repr(tuple(self.points)).encode(), digest_size=16)
        for name, factors in sorted(self.factors.items()):
            points.update(name.encode() + factors.values.tobytes())
        return {
            "float model": fingerprint(self.reference.model),
            "quantized model": fingerprint(self.extended.model),
            "set of tensors": points.hexdigest(),
        }


@dataclass(slots=True, eq=False)
class PairTally:
    """What some samples show: one, a shard, or all.

    Attributes:
        samples: how many.
        sums: of each point, by name.
        mismatched: points whose shapes differ between the models, with both shapes.
        seconds: inside ONNX Runtime (`float`, `quantized`) and for the figures, added up over threads.
    """

    samples: int = 0
    sums: dict[str, TensorSums] = field(default_factory=dict)
    mismatched: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("float", "quantized", "figures"), 0.0)
    )

    def merge(self, more: PairTally) -> None:
        """Add samples behind these."""
        self.samples += more.samples
        for name, sums in more.sums.items():
            self.sums.setdefault(name, TensorSums()).merge(sums)
        self.mismatched |= more.mismatched
        for step, spent in more.seconds.items():
            self.seconds[step] += spent

    def arrays(self) -> Arrays:
        """Plain arrays that `from_arrays` reads back."""
        arrays: Arrays = {}
        for number, sums in enumerate(self.sums.values()):
            arrays |= {f"{number}.{key}": array for key, array in sums.arrays().items()}
        facts = [self.samples, list(self.sums), self.mismatched, self.seconds]
        return {**arrays, "facts": as_array(facts)}

    @staticmethod
    def from_arrays(arrays: Mapping[str, Array]) -> PairTally:
        """The inverse of `arrays`."""
        samples, names, mismatched, seconds = as_tree(arrays["facts"])
        by_point: dict[str, Arrays] = {}
        for key, array in arrays.items():
            number, _, field = key.partition(".")
            by_point.setdefault(number, {})[field] = array
        sums = {name: TensorSums.from_arrays(by_point[str(number)]) for number, name in enumerate(names)}
        return PairTally(samples, sums, mismatched, seconds)


def compare_samples(
    subject: Subject, samples: Iterable[Sample], progress: Callable[[int], None], work: Work
) -> PairTally:
    """Compare every point over every sample.

    Sums run over the samples of a shard, in their order, and then over the shards: the result does not depend
    on how many run at once, or on how many machines.

    Raises:
        DataError: there are no samples, one does not fit, or the checkpoint is of another run.
        ModelError: ONNX Runtime cannot run a model.
    """
    feed = feed_of(samples, sees_files=work.sees_files)
    pieces = feed.shards(digests=work.store is not None)
    head = next(pieces, None)
    if head is None:
        raise DataError("There are no samples.", hint="Give at least one; 32 are plenty.")
    few = len(head.samples if head.files is None else head.files.files)
    task = _Task(subject, feed.example(head), few if few < SIZE else None)
    total = PairTally()
    for shard, arrays in mapped(work, task, itertools.chain([head], pieces), "compare", subject.key):
        total.merge(PairTally.from_arrays(arrays))
        feed.taken(shard, arrays)
        progress(total.samples)
    feed.finish(total.samples)
    return total


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    subject: Subject
    first: Sample
    most: int | None  # samples there are, where they are few

    def open(self, cores: int) -> _Opened:
        return _Opened(self.subject, self.first, cores, min(cores, self.most or cores))


@dataclass(frozen=True, slots=True, eq=False)
class PairedGroup:
    """Points that are compared in one go, and the sessions that give their tensors."""

    points: Sequence[Point]
    float_names: list[str]
    float_session: ort.InferenceSession | None  # None where the graph inputs are all that is needed
    quantized_sessions: Sequence[tuple[ort.InferenceSession, list[str]]]

    def floats(self, subject: Subject, sample: Sample, index: int) -> dict[str, Array]:
        """The float model's tensors, in the quantized model's scale."""
        found = {n: a for n, a in sample.items() if n in self.float_names}
        wanted = [n for n in self.float_names if n not in found]
        if self.float_session is not None:
            found |= run_session(self.float_session, wanted, sample, index)
        for name in found.keys() & subject.factors.keys():
            found[name] = subject.factors[name].apply(found[name])
        return found

    def quantized(
        self, subject: Subject, sample: Sample, floats: Mapping[str, Array], index: int
    ) -> dict[str, Array]:
        """The extended model's tensors, by their names in it."""
        feed = {**sample, **{subject.fetches[n].feed: a for n, a in floats.items()}}
        results: dict[str, Array] = {}
        for session, outputs in self.quantized_sessions:
            given = {i.name: feed[i.name] for i in session.get_inputs()}
            results |= run_session(session, outputs, given, index)
        return results


class _Opened:
    """Both models, ready to run.

    Args:
        subject: the models and the points.
        first: a sample that tells how large the tensors are.
        cores: how many threads may work in all.
        samples: the most samples that can run at once.
    """

    def __init__(self, subject: Subject, first: Sample, cores: int, samples: int) -> None:
        self._subject = subject
        known = {point.name: point for point in subject.points}
        single = tensor_bytes(subject.reference.model, list(known), first)
        sizes = {name: _COPIES * max(size, 1) for name, size in single.items()}
        parts = grouped(list(known), sizes, MAX_LIVE_BYTES)
        live = max(sum(sizes[name] for name in part) for part in parts)
        workers = max(1, min(samples, MAX_LIVE_BYTES // max(live, 1)))
        self.parallel = min(workers, 2)  # the second shard begins while the first one's last samples run
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="roundel-compare")
        # Figures are many short calls: threads that make them side by side wait for Python, one for another.
        self._turns = BoundedSemaphore(max(1, workers // 2))
        with collector_paused():
            threads = max(1, cores // workers)
            self._groups = [open_group(subject, [known[name] for name in part], threads) for part in parts]

    def __call__(self, part: Shard) -> Arrays:
        tally = PairTally()
        reading = Reading(part)
        for one in self._pool.map(self._sample, reading, itertools.count(part.first)):
            tally.merge(one)
        return tally.arrays() | reading.told()

    def _sample(self, sample: Sample, index: int) -> PairTally:
        one = PairTally(1)
        for group in self._groups:
            started = time.perf_counter()
            floats = group.floats(self._subject, sample, index)
            halfway = time.perf_counter()
            results = group.quantized(self._subject, sample, floats, index)
            one.seconds["float"] += halfway - started
            one.seconds["quantized"] += time.perf_counter() - halfway
            with self._turns:
                finished = time.perf_counter()
                for point in group.points:
                    self._figures(point, floats[point.name], results, one)
                one.seconds["figures"] += time.perf_counter() - finished
        return one

    def _figures(self, point: Point, floats: Array, results: Mapping[str, Array], one: PairTally) -> None:
        fetch = self._subject.fetches[point.name]
        shown = results[fetch.shown]
        if shown.shape != floats.shape:
            shapes = f"shape {list(floats.shape)} in float, {list(shown.shape)} in quantized"
            one.mismatched[point.name] = shapes
            return
        shadow, stored = (None if name is None else results[name] for name in (fetch.shadow, fetch.stored))
        axis, storage = output_channel_axis(point.op, floats.ndim), self._subject.storages.get(point.name)
        classes = point.place == "output"
        sums = measure((floats, shown), (shadow, stored), axis, storage, classes=classes)
        if point.name in self._subject.joints and sums.count and not sums.broken:
            parts = paired_parts(point.name, floats, shown, self._subject.joints)
            sums.parts = {name: Closeness.of(wanted, got) for name, wanted, got in parts}
        one.sums[point.name] = sums


def open_group(subject: Subject, points: Sequence[Point], threads: int) -> PairedGroup:
    """The points with the sessions that give their tensors."""
    fetches, float_model, extended = subject.fetches, subject.reference.model, subject.extended.model
    known = {point.name for point in subject.points}
    names = dict.fromkeys(name for p in points for name in (p.name, *p.sources) if name in known)
    given = {str(value.name) for value in float_model.graph.inputs}
    wanted = [name for name in names if name not in given]
    float_session = open_session(cut_to(float_model, wanted), threads=threads) if wanted else None
    spare = {fetch.feed for fetch in fetches.values()} - {fetches[name].feed for name in names}
    amd = any(node.domain == QUARK for node in extended.graph)
    sessions = []
    for outputs in _parts([fetches[p.name] for p in points], amd=amd):
        part = cut_to(extended, outputs, drop_inputs=spare)
        sessions.append((open_session(part, threads=threads, simulate=True), outputs))
    return PairedGroup(points, list(names), float_session, sessions)


def _parts(fetches: Sequence[Fetch], *, amd: bool) -> list[list[str]]:
    """What each session computes: one for all, unless AMD's operators make the graph long.

    Their bodies have dozens of nodes each, and ONNX Runtime's time to load grows with the square of all.
    """
    names = [(fetch.shown, fetch.shadow, fetch.stored) for fetch in fetches]
    kinds = [[name for name in kind if name is not None] for kind in zip(*names, strict=True)]
    if not amd:
        kinds = [[name for kind in kinds for name in kind]]
    return [list(dict.fromkeys(kind)) for kind in kinds if kind]
