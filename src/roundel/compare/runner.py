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
from roundel.compare.measure import Arrays, TensorSums, measure
from roundel.compare.points import Point
from roundel.compare.rescaling import Factors
from roundel.compare.shadow import Extended
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
    float_session: ort.InferenceSession
    quantized_session: ort.InferenceSession
    outputs: list[str]


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
        if wanted:
            floats |= run_session(group.float_session, wanted, sample, index)
        for name in floats:
            factors = subject.factors.get(name)
            if factors is not None:
                floats[name] = factors.apply(floats[name])
        halfway = time.perf_counter()
        fetches = subject.extended.fetches
        feed = {**sample, **{fetches[n].feed: a for n, a in floats.items()}}
        needed = {i.name for i in group.quantized_session.get_inputs()}
        feed = {name: array for name, array in feed.items() if name in needed}
        results = run_session(group.quantized_session, group.outputs, feed, index)
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
    outputs = dict.fromkeys(name for p in points for name in fetches[p.name].outputs)
    reference = _with_outputs(subject.reference, [name for name in names if name not in given])
    extended = _with_outputs(subject.extended.model, list(outputs))
    feeds = {fetches[name].feed for name in names}
    _drop_inputs(extended, {fetch.feed for fetch in fetches.values()} - feeds)
    return _Group(
        points,
        list(names),
        open_session(reference, threads=threads),
        open_session(extended, threads=threads, simulate=True),
        list(outputs),
    )


def _with_outputs(model: ir.Model, names: Sequence[str]) -> ir.Model:
    clone = model.clone()
    values = values_by_name(clone.graph)
    clone.graph.outputs.clear()
    clone.graph.outputs.extend(values[name] for name in names)
    return clone


def _drop_inputs(model: ir.Model, names: set[str]) -> None:
    """Take out what nothing needed can read: first the nodes that are not needed, then the inputs."""
    if not names:
        return
    needed: set[ir.Node] = set()
    pending = [value.producer() for value in model.graph.outputs]
    while pending:
        node = pending.pop()
        if node is None or node in needed:
            continue
        needed.add(node)
        pending += [value.producer() for value in node.inputs if value is not None]
        pending += [v.producer() for v in _captured(node)]
    model.graph.remove([node for node in model.graph if node not in needed])
    for value in [v for v in model.graph.inputs if v.name in names]:
        model.graph.inputs.remove(value)


def _captured(node: ir.Node) -> Iterator[ir.Value]:
    """Values of the graph that the bodies of a node read."""
    for attribute in node.attributes.values():
        if attribute.type is ir.AttributeType.GRAPH:
            for inner in attribute.as_graph().all_nodes():
                yield from (value for value in inner.inputs if value is not None)


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
