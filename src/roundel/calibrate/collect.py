"""One pass over the calibration data that yields every statistic that was asked for, here or by workers."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

import numpy as np
import onnx_ir as ir

from roundel.calibrate.observers import INFINITE, OBSERVERS, NonFiniteError, Observer, StatKind
from roundel.calibrate.runner import Extremes, Runner
from roundel.data.kept import KeptSamples
from roundel.data.shards import Reading, SampleDigest, Shard, feed_of
from roundel.errors import DataError, InfiniteTensorError, ModelError, did_you_mean
from roundel.model.files import Portable
from roundel.model.graph import fingerprint, is_constant, values_by_name
from roundel.model.memory import Budget, budget, within
from roundel.model.session import give_memory_back
from roundel.types import Array, Arrays, Sample, below
from roundel.work.executors import Ready, Work, mapped, usable_cores


def open_runner(
    model: ir.Model,
    requests: Mapping[str, StatKind],
    first: Sample,
    *,
    cores: int,
    samples: int,
    device: int | None,
) -> Runner:
    """A runner for the requested tensors that are computed; those that are fed are observed as they come."""
    fed = {value.name for value in model.graph.inputs}
    tensors = [name for name in requests if name not in fed]
    extremes = {name for name, kind in requests.items() if kind is StatKind.MINMAX}
    return Runner(model, tensors, first, cores=cores, samples=samples, extremes=extremes, device=device)


class ObservedShard:
    """Observers of every requested tensor for the samples of one worker.

    Args:
        requests: the statistic for each tensor, in topological order of the tensors.
    """

    def __init__(self, requests: Mapping[str, StatKind]) -> None:
        self.stats: dict[str, Observer] = {name: OBSERVERS[kind]() for name, kind in requests.items()}
        self._positions: dict[str, list[int]] = defaultdict(list)

    def take(self, runner: Runner, sample: Sample, index: int, *, finals: bool) -> tuple[Sample, float]:
        """Run and observe one sample; the model's own outputs (if asked for) and the seconds it ran.

        Raises:
            DataError: the sample does not fit the model, or an observed tensor is not finite.
            ModelError: ONNX Runtime cannot run the model.
        """
        faults = self._observe(sample, index)
        outputs: Sample = {}
        seconds = 0.0
        for run in runner.stream(sample, index, finals=finals):
            seconds += run.seconds
            outputs |= run.finals
            faults |= self._observe(run.tensors, index)
            self._note(run.extremes, index)
        if faults:
            raise self._not_finite(faults, sample, index)
        return outputs, seconds

    def merge(self, other: ObservedShard) -> None:
        """Add another worker's samples."""
        for name, observer in self.stats.items():
            observer.merge(other.stats[name])  # type: ignore[arg-type]
            self._positions[name] += other._positions[name]

    def state(self) -> Arrays:
        """The statistics as plain arrays. Tensor names may hold anything; a number stands for each."""
        observers = enumerate(self.stats.values())
        return {f"stat.{n}.{key}": array for n, each in observers for key, array in each.state().items()}

    def append(self, arrays: Mapping[str, Array]) -> None:
        """Add the `state` of a worker whose samples follow those that were seen so far."""
        for number, observer in enumerate(self.stats.values()):
            observer.merge(type(observer).from_state(below(arrays, f"stat.{number}.")))

    def in_sample_order(self) -> dict[str, Observer]:
        """The observers, with their samples in the order of the data whatever worker took them."""
        for name, observer in self.stats.items():
            observer.reorder(self._positions[name])
        return self.stats

    def _observe(self, arrays: Mapping[str, Array], index: int) -> dict[str, str]:
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


@dataclass(frozen=True, slots=True, eq=False)
class ShardTask:
    """What all workers have in common.

    Attributes:
        model: the float model.
        requests: the statistic for each tensor, in topological order.
        keep: how many of the first samples to send back, with the model's outputs for them.
        first: a sample that tells how large the tensors are.
        device: the GPU that runs the model, or None for the CPU.
        memory: what a worker may use.
    """

    model: Portable
    requests: dict[str, StatKind]
    keep: int
    first: Sample
    device: int | None
    memory: Budget

    def open(self, cores: int) -> Ready[Shard]:
        """Sessions for the model."""
        model = self.model.model()
        with within(self.memory):
            runner = open_runner(
                model, self.requests, self.first, cores=cores, samples=cores, device=self.device
            )
        return Ready(partial(self._observed, runner), runner.workers)

    def _observed(self, runner: Runner, part: Shard) -> Arrays:
        observed, total = ObservedShard(self.requests), 0.0
        arrays: Arrays = {}
        reading = Reading(part)
        for index, sample in enumerate(reading, part.first):
            if part.files is not None and index < self.keep:
                arrays |= {f"in.{index}.{name}": array for name, array in sample.items()}
            outputs, seconds = observed.take(runner, sample, index, finals=index < self.keep)
            total += seconds
            arrays |= {f"out.{index}.{name}": array for name, array in outputs.items()}
        return arrays | reading.told() | observed.state() | {"seconds": np.array(total)}


def shard_key(
    model: ir.Model, requests: Mapping[str, StatKind], keep: int, device: int | None
) -> dict[str, str]:
    """What finished shards are remembered under: another model, request or device is another run."""
    listed = json.dumps([[name, kind.value] for name, kind in requests.items()] + [keep])
    return {
        "model": fingerprint(model),
        "recipe": hashlib.blake2b(listed.encode(), digest_size=16).hexdigest(),
        "device": "cpu" if device is None else f"gpu {device}",
    }


_STEP = "calibrate"  # finished shards are remembered under this name
_TIDY = 50  # samples, after which free pieces of the heap go back: they would add up


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """What one pass over the data leaves behind.

    Attributes:
        stats: the observer of each requested tensor.
        samples_seen: number of samples.
        inputs: the first samples, copied.
        outputs: the float model's own outputs for them, in the same order.
        data_digest: `SampleDigest` of all samples in order.
        forward_seconds: time inside ONNX Runtime, added up over the samples that ran side by side.
    """

    stats: dict[str, Observer]
    samples_seen: int
    inputs: Sequence[Sample]
    outputs: Sequence[Sample]
    data_digest: str
    forward_seconds: float


def collect(
    model: ir.Model,
    requests: Mapping[str, StatKind],
    samples: Iterable[Sample],
    *,
    keep: int = 16,
    progress: Callable[[int], None] | None = None,
    work: Work | None = None,
) -> Collected:
    """Run the float model over the samples once and observe the requested tensors.

    Several samples run at once, one to a core. The statistics do not depend on how many: histograms merge
    exactly and per-sample extremes are put back in sample order. Every sample may have shapes of its own.

    Args:
        model: the float model; it is not changed.
        requests: tensor names of the main graph, each with the statistic to gather.
        samples: the model's inputs, one dictionary per run.
        keep: how many samples to keep, with the float model's outputs for them.
        progress: called with the number of samples done, after each.
        work: how many threads work in all, or other processes or machines to share the samples with, and a
            memory of finished shards; None takes every core this process may use.

    Raises:
        ModelError: a requested tensor is not in the graph or is constant, or the model does not run.
        DataError: there are no samples, one does not fit, or a tensor is not finite.
    """
    ordered = {name: requests[name] for name in _topological(model, requests)}
    one, work = _Pass(model, ordered, keep, progress), work or Work()
    if not work.alone:
        return one.by_workers(samples, work)
    cores = usable_cores() if work.threads is None else max(1, work.threads)
    return one.by_threads(samples, cores, work.device)


@dataclass(slots=True, eq=False)
class _Pass:
    """One pass over the data, and what it has gathered so far beside the statistics, in sample order."""

    model: ir.Model
    requests: Mapping[str, StatKind]
    keep: int
    progress: Callable[[int], None] | None
    _inputs: KeptSamples = field(default_factory=KeptSamples)
    _outputs: KeptSamples = field(default_factory=KeptSamples)
    _seen: int = 0
    _seconds: float = 0.0

    def _hold(self, sample: Sample, outputs: Sample) -> None:
        """Keep a sample with the model's outputs for it."""
        self._inputs.append(sample)
        self._outputs.append(outputs)

    def _count(self, samples: int, seconds: float) -> None:
        """So many more samples are done, and ran so long."""
        self._seen += samples
        self._seconds += seconds
        if self.progress is not None:
            self.progress(self._seen)

    def _collected(self, stats: dict[str, Observer], digest: str) -> Collected:
        """The end of the pass.

        Raises:
            DataError: there were no samples.
        """
        if not self._seen:
            raise DataError("There are no calibration samples.", hint="Give at least one; 100 are usual.")
        return Collected(stats, self._seen, self._inputs, self._outputs, digest, self._seconds)

    def by_threads(self, samples: Iterable[Sample], cores: int, device: int | None) -> Collected:
        """One sample to a thread of this process."""
        digest = SampleDigest()
        # Copies: a reader may reuse its arrays while earlier samples still run.
        owned = ({name: np.array(a) for name, a in sample.items()} for sample in digest.watch(samples))
        iterator = enumerate(owned)
        # Looking ahead tells whether there are enough samples to keep every core busy with one of its own.
        ahead = list(itertools.islice(iterator, cores))
        if not ahead:
            return self._collected({}, digest.hexdigest())
        first, most = ahead[0][1], len(ahead)
        runner = open_runner(self.model, self.requests, first, cores=cores, samples=most, device=device)
        shards = [ObservedShard(self.requests) for _ in range(runner.workers)]
        done = _in_order(runner, shards, itertools.chain(ahead, iterator), self.keep)
        for index, sample, (outputs, seconds) in done:
            if index < self.keep:
                self._hold(sample, outputs)
            if (index + 1) % _TIDY == 0:
                give_memory_back()
            self._count(1, seconds)
        for shard in shards[1:]:
            shards[0].merge(shard)
        return self._collected(shards[0].in_sample_order(), digest.hexdigest())

    def by_workers(self, samples: Iterable[Sample], work: Work) -> Collected:
        """Several samples to each part of the work, which other processes or machines share."""
        model, requests, keep = self.model, dict(self.requests), self.keep
        feed = feed_of(samples, sees_files=work.sees_files)
        pieces = feed.shards(digests=work.store is not None, long=True)
        head = next(pieces, None)
        if head is None:
            return self._collected({}, feed.digest)
        task = ShardTask(Portable.of(model), requests, keep, feed.example(head), work.device, budget())
        key = partial(shard_key, model, requests, keep, work.device)
        names = [str(value.name) for value in model.graph.outputs]
        whole = ObservedShard(requests)
        for shard, arrays in mapped(work, task, itertools.chain([head], pieces), _STEP, key):
            taken = feed.taken(shard, arrays)
            for index in range(shard.first, min(shard.first + taken, keep)):
                outputs = {name: arrays[f"out.{index}.{name}"] for name in names}
                self._hold(feed.sample(shard, arrays, index), outputs)
            whole.append(arrays)
            self._count(taken, float(arrays["seconds"]))
        feed.finish(self._seen)
        return self._collected(whole.stats, feed.digest)


def _in_order(
    runner: Runner, shards: list[ObservedShard], samples: Iterator[tuple[int, Sample]], keep: int
) -> Iterator[tuple[int, Sample, tuple[Sample, float]]]:
    """Results in sample order, while as many samples as there are shards run at once."""
    free: SimpleQueue[ObservedShard] = SimpleQueue()
    for shard in shards:
        free.put(shard)

    def work(index: int, sample: Sample) -> tuple[Sample, float]:
        shard = free.get()
        try:
            return shard.take(runner, sample, index, finals=index < keep)
        finally:
            free.put(shard)

    waiting: deque[tuple[int, Sample, Future[tuple[Sample, float]]]] = deque()
    pool = ThreadPoolExecutor(len(shards), thread_name_prefix="roundel-collect")
    try:
        for index, sample in samples:
            waiting.append((index, sample, pool.submit(work, index, sample)))
            # One sample more than there are workers is drawn ahead, so that none of them waits for data.
            if len(waiting) > len(shards):
                done, used, future = waiting.popleft()
                yield done, used, future.result()
        for done, used, future in waiting:
            yield done, used, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _topological(model: ir.Model, requests: Mapping[str, StatKind]) -> list[str]:
    """The requested names in graph order, each proved to be a computed or fed tensor."""
    values = values_by_name(model.graph)
    for name in requests:
        if name not in values:
            raise ModelError(
                "A tensor to observe is not in the main graph.", where=name, hint=did_you_mean(name, values)
            )
        if is_constant(values[name]):
            raise ModelError("A tensor to observe is a constant.", where=name, hint="Read its value instead.")
    return [name for name in values if name in requests]
