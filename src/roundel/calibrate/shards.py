"""The part of a collection that one worker does: run a sample, observe it, remember which one it was."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.calibrate.observers import INFINITE, OBSERVERS, NonFiniteError, Observer, StatKind, new_observer
from roundel.calibrate.runner import Extremes, Runner
from roundel.data.shards import Reading, Shard, feed_of
from roundel.errors import DataError, InfiniteTensorError
from roundel.model.files import Portable
from roundel.model.graph import fingerprint
from roundel.model.memory import Budget, budget, within
from roundel.types import Arrays, Sample
from roundel.work.executors import Work, mapped


@dataclass(frozen=True, slots=True, eq=False)
class ShardSeen:
    """What one sample leaves behind, beside the statistics."""

    outputs: Sample | None
    seconds: float


class ObservedShard:
    """Observers of every requested tensor for the samples of one worker.

    Args:
        requests: the statistic for each tensor, in topological order of the tensors.
    """

    def __init__(self, requests: Mapping[str, StatKind]) -> None:
        self.stats: dict[str, Observer] = {name: new_observer(kind) for name, kind in requests.items()}
        self._positions: dict[str, list[int]] = defaultdict(list)

    def take(self, runner: Runner, sample: Sample, index: int, *, finals: bool) -> ShardSeen:
        """Run and observe one sample.

        Raises:
            DataError: the sample does not fit the model, or an observed tensor is not finite.
            ModelError: ONNX Runtime cannot run the model.
        """
        faults = self._observe(sample, index)
        outputs: Sample | None = None
        seconds = 0.0
        for run in runner.stream(sample, index, finals=finals):
            seconds += run.seconds
            if finals and outputs is None:
                outputs = run.finals
            faults |= self._observe(run.tensors, index)
            self._note(run.extremes, index)
        if faults:
            raise self._not_finite(faults, sample, index)
        return ShardSeen(outputs, seconds)

    def merge(self, other: ObservedShard) -> None:
        """Add another worker's samples."""
        for name, observer in self.stats.items():
            _merge_pair(observer, other.stats[name])
            self._positions[name] += other._positions[name]

    def in_sample_order(self) -> dict[str, Observer]:
        """The observers, with their samples in the order of the data whatever worker took them."""
        for name, observer in self.stats.items():
            observer.reorder(self._positions[name])
        return self.stats

    def _observe(self, arrays: Mapping[str, NDArray[Any]], index: int) -> dict[str, str]:
        faults: dict[str, str] = {}
        for name, array in arrays.items():
            if name not in self.stats or array.size == 0:
                continue
            try:
                self.stats[name].update(array)
            except NonFiniteError as error:
                faults[name] = str(error)
            self._positions[name].append(index)
        return faults

    def _note(self, extremes: Mapping[str, Extremes], index: int) -> None:
        for name, seen in extremes.items():
            if seen.count:
                self.stats[name].update_extremes(seen.low, seen.high, seen.count)
                self._positions[name].append(index)

    def _not_finite(self, faults: Mapping[str, str], sample: Sample, index: int) -> DataError:
        first = next(name for name in self.stats if name in faults)
        hint = "It is the first such tensor in the order of the graph; look at the node that makes it."
        broken = [n for n, a in sample.items() if a.dtype.kind == "f" and not np.isfinite(a).all()]
        if broken:
            hint = f"The sample's input '{broken[0]}' holds NaN or infinity itself; repair the data."
        error = DataError(
            f"A tensor holds {faults[first]} during calibration.",
            where=f"tensor '{first}', sample {index}",
            observed=f"{len(faults)} observed tensor(s) not finite in this sample",
            expected="finite values",
            hint=hint,
        )
        infinite = not broken and all(fault == INFINITE for fault in faults.values())
        return InfiniteTensorError.of(faults, error) if infinite else error


def _merge_pair(into: Observer, other: Observer) -> None:
    if type(into) is not type(other):
        raise TypeError("observers of different kinds cannot be merged")
    into.merge(other)


@dataclass(frozen=True, slots=True, eq=False)
class Sharded:
    """What the shards leave behind together.

    Attributes:
        stats: the observer of each tensor.
        seen: number of samples.
        inputs: the first samples.
        outputs: the model's own outputs for them.
        seconds: inside ONNX Runtime.
        digest: `SampleDigest` of all samples in order.
    """

    stats: dict[str, Observer]
    seen: int
    inputs: list[Sample]
    outputs: list[Sample]
    seconds: float
    digest: str


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    model: Portable
    requests: dict[str, StatKind]
    keep: int
    first: Sample
    device: int | None
    memory: Budget

    def open(self, cores: int) -> _Opened:
        model = self.model.model()
        fed = {value.name for value in model.graph.inputs}
        computed = [name for name in self.requests if name not in fed]
        extremes = {name for name, kind in self.requests.items() if kind is StatKind.MINMAX}
        with within(self.memory):
            runner = Runner(
                model,
                computed,
                self.first,
                cores=cores,
                samples=cores,
                extremes=extremes,
                device=self.device,
            )
        return _Opened(runner, self.requests, self.keep)


@dataclass(frozen=True, slots=True, eq=False)
class _Opened:
    runner: Runner
    requests: dict[str, StatKind]
    keep: int

    @property
    def parallel(self) -> int:
        return self.runner.workers

    def __call__(self, part: Shard) -> Arrays:
        observing, seconds = ObservedShard(self.requests), 0.0
        arrays: Arrays = {}
        reading = None if part.files is None else Reading(part.files)
        for index, sample in enumerate(reading or part.samples, part.first):
            if reading is not None and index < self.keep:
                arrays |= {f"in.{index}.{name}": array for name, array in sample.items()}
            seen = observing.take(self.runner, sample, index, finals=index < self.keep)
            seconds += seen.seconds
            for name, array in (seen.outputs or {}).items():
                arrays[f"out.{index}.{name}"] = array
        for number, observer in enumerate(observing.stats.values()):
            # Tensor names may hold anything; a number stands for each.
            arrays |= {f"stat.{number}.{key}": array for key, array in observer.state().items()}
        if reading is not None:
            arrays |= reading.told()
        return arrays | {"seconds": np.array(seconds)}


def collect_shards(
    model: ir.Model,
    requests: Mapping[str, StatKind],
    samples: Iterable[Sample],
    *,
    keep: int,
    work: Work,
    step: str,
    progress: Callable[[int], None] | None,
) -> Sharded:
    """Observe all samples; see `collect`.

    Args:
        model: the float model.
        requests: the statistic for each tensor, in topological order.
        samples: the model's inputs, at least one.
        keep: how many samples to keep.
        work: where, and what is remembered.
        step: the name under which it is remembered.
        progress: called with the number of samples done.
    """
    wanted = dict(requests)
    feed = feed_of(samples, sees_files=work.sees_files)
    pieces = feed.shards(digests=work.store is not None, long=True)
    head = next(pieces, None)
    total = Sharded({name: OBSERVERS[kind]() for name, kind in wanted.items()}, 0, [], [], 0.0, "")
    if head is None:
        return total
    task = _Task(Portable.of(model), wanted, keep, feed.example(head), work.device, budget())
    names = [str(value.name) for value in model.graph.outputs]
    memory = work.memory(step, _key(model, wanted, keep, work.device)) if work.store is not None else None
    seen, seconds = 0, 0.0
    for shard, arrays in mapped(work, task, _chained(head, pieces), memory):
        taken = feed.taken(shard, arrays)
        for index in range(shard.first, shard.first + taken):
            if index < keep:
                total.inputs.append(feed.sample(shard, arrays, index))
                total.outputs.append({name: arrays[f"out.{index}.{name}"] for name in names})
        for number, (name, kind) in enumerate(wanted.items()):
            prefix = f"stat.{number}."
            state = {k.removeprefix(prefix): a for k, a in arrays.items() if k.startswith(prefix)}
            _merge(total.stats[name], OBSERVERS[kind].from_state(state))
        seen, seconds = seen + taken, seconds + float(arrays["seconds"])
        if progress is not None:
            progress(seen)
    feed.finish(seen)
    return Sharded(total.stats, seen, total.inputs, total.outputs, seconds, feed.digest)


def _chained(head: Shard, rest: Iterator[Shard]) -> Iterator[Shard]:
    yield head
    yield from rest


def _merge(into: Observer, other: Observer) -> None:
    into.merge(other)  # type: ignore[arg-type]  # both are of the requested kind


def _key(model: ir.Model, requests: Mapping[str, StatKind], keep: int, device: int | None) -> dict[str, str]:
    listed = json.dumps([[name, kind.value] for name, kind in requests.items()] + [keep])
    return {
        "model": fingerprint(model),
        "recipe": hashlib.blake2b(listed.encode(), digest_size=16).hexdigest(),
        "device": "cpu" if device is None else f"gpu {device}",
    }
