"""Runs both models side by side over the samples, within a bound on memory."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from roundel.calibrate.runner import run_session
from roundel.check.pairs import QUARK
from roundel.compare.cutting import cut_to
from roundel.compare.measure import Arrays, TensorSums, measure
from roundel.compare.points import Point
from roundel.compare.rescaling import Factors
from roundel.compare.shadow import Extended, Fetch
from roundel.compare.types import Storage
from roundel.errors import DataError
from roundel.model.graph import values_by_name
from roundel.model.session import open_session
from roundel.types import Sample

MAX_LIVE_BYTES = 1_500_000_000
"""Tensors of all runs in flight; a sample that needs more runs once for each group of points."""

_COPIES = 4  # float, shown, shadow, stored


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """Both models and what is to be compared.

    Attributes:
        reference: the float model.
        extended: the quantized model with its shadow.
        points: the tensors.
        storages: how each is stored, by name; a point that stays float has none.
        factors: what float channels are multiplied by, by name.
    """

    reference: ir.Model
    extended: Extended
    points: Sequence[Point]
    storages: Mapping[str, Storage]
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
    points: Sequence[Point]
    float_names: list[str]
    float_session: ort.InferenceSession | None  # None where the graph inputs are all that is needed
    quantized_sessions: Sequence[tuple[ort.InferenceSession, list[str]]]


@dataclass(frozen=True, slots=True, eq=False)
class _One:
    """One sample."""

    sums: dict[str, TensorSums]
    mismatched: dict[str, str]
    seconds: dict[str, float]


def run_both(subject: Subject, samples: Iterable[Sample], progress: Callable[[int], None]) -> Outcome:
    """Compare every point over every sample.

    Several samples run at once, one to a core; their sums are added in the order of the samples, so that the
    result does not depend on how many.

    Raises:
        DataError: there are no samples, or one does not fit.
        ModelError: ONNX Runtime cannot run a model.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    iterator = enumerate(samples)
    ahead = list(itertools.islice(iterator, cores))
    if not ahead:
        raise DataError("There are no samples.", hint="Give at least one; 32 are plenty.")
    sizes = _bytes(subject, ahead[0][1])
    parts = _split(subject.points, sizes)
    live = max(sum(sizes[p.name] for p in part) for part in parts)
    workers = max(1, min(len(ahead), MAX_LIVE_BYTES // max(live, 1)))
    groups = [_group(subject, part, max(1, cores // workers)) for part in parts]
    sums = {point.name: TensorSums() for point in subject.points}
    mismatched: dict[str, str] = {}
    seconds = dict.fromkeys(("float", "quantized", "figures"), 0.0)
    done = 0
    for result in _in_order(subject, groups, itertools.chain(ahead, iterator), workers):
        for name, more in result.sums.items():
            sums[name].merge(more)
        mismatched |= result.mismatched
        for step, spent in result.seconds.items():
            seconds[step] += spent
        done += 1
        progress(done)
    return Outcome(sums, done, mismatched, seconds)


def _in_order(
    subject: Subject, groups: Sequence[_Group], samples: Iterator[tuple[int, Sample]], workers: int
) -> Iterator[_One]:
    with ThreadPoolExecutor(workers, thread_name_prefix="roundel-compare") as pool:
        waiting: deque[Future[_One]] = deque()
        try:
            for index, sample in samples:
                if len(waiting) >= workers:
                    yield waiting.popleft().result()
                waiting.append(pool.submit(_sample, subject, groups, dict(sample), index))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _sample(subject: Subject, groups: Sequence[_Group], sample: Sample, index: int) -> _One:
    one = _One({}, {}, dict.fromkeys(("float", "quantized", "figures"), 0.0))
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
        finished = time.perf_counter()
        for point in group.points:
            _figures(subject, point, floats[point.name], results, one)
        one.seconds["float"] += halfway - started
        one.seconds["quantized"] += finished - halfway
        one.seconds["figures"] += time.perf_counter() - finished
    return one


def _figures(
    subject: Subject, point: Point, floats: NDArray[Any], results: Mapping[str, NDArray[Any]], one: _One
) -> None:
    fetch = subject.extended.fetches[point.name]
    shown = results[fetch.shown]
    if shown.shape != floats.shape:
        one.mismatched[point.name] = f"shape {list(floats.shape)} in float, {list(shown.shape)} in quantized"
        return
    arrays = Arrays(
        float=floats,
        shown=shown,
        shadow=None if fetch.shadow is None else results[fetch.shadow],
        stored=None if fetch.stored is None else results[fetch.stored],
    )
    axis = point.channel_axis(floats.ndim)
    storage = subject.storages.get(point.name)
    one.sums[point.name] = measure(arrays, axis, storage, classes=point.place == "output")


def _group(subject: Subject, points: Sequence[Point], threads: int) -> _Group:
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


def _bytes(subject: Subject, sample: Sample) -> dict[str, int]:
    """Bytes of every point in flight, from one run that returns element counts only."""
    model = subject.reference.clone()
    values = values_by_name(model.graph)
    model.graph.outputs.clear()
    given = {str(value.name) for value in model.graph.inputs}
    sizes = {p.name: sample[p.name].size for p in subject.points if p.name in given}
    counters = {}
    for number, point in enumerate(p for p in subject.points if p.name not in given):
        node = ir.node("Size", [values[point.name]])
        node.outputs[0].name = f"roundel_size_{number}"
        node.outputs[0].type = ir.TensorType(ir.DataType.INT64)
        model.graph.append(node)
        model.graph.outputs.append(node.outputs[0])
        counters[point.name] = str(node.outputs[0].name)
    if counters:
        counts = run_session(open_session(model), list(counters.values()), sample, 0)
        sizes |= {name: int(counts[counter]) for name, counter in counters.items()}
    return {name: _COPIES * 4 * max(size, 1) for name, size in sizes.items()}


def _split(points: Sequence[Point], sizes: Mapping[str, int]) -> list[list[Point]]:
    groups: list[list[Point]] = [[]]
    live = 0
    for point in points:
        if groups[-1] and live + sizes[point.name] > MAX_LIVE_BYTES:
            groups.append([])
            live = 0
        groups[-1].append(point)
        live += sizes[point.name]
    return groups
