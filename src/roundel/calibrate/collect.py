"""One pass over the calibration data that yields every statistic that was asked for."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
import onnx_ir as ir

from roundel.calibrate.observers import Observer, StatKind
from roundel.calibrate.runner import Runner
from roundel.calibrate.shards import ObservedShard, ShardSeen, collect_shards
from roundel.data.kept import KeptSamples
from roundel.data.shards import SampleDigest
from roundel.errors import DataError, ModelError, did_you_mean
from roundel.model.graph import is_constant, values_by_name
from roundel.model.session import give_memory_back
from roundel.types import Sample
from roundel.work.executors import Work, usable_cores

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
        wall_seconds: time of the whole pass, sessions and reading of samples included.
    """

    stats: dict[str, Observer]
    samples_seen: int
    inputs: Sequence[Sample]
    outputs: Sequence[Sample]
    data_digest: str
    forward_seconds: float
    wall_seconds: float


def collect(
    model: ir.Model,
    requests: Mapping[str, StatKind],
    samples: Iterable[Sample],
    *,
    keep: int = 16,
    progress: Callable[[int], None] | None = None,
    threads: int | None = None,
    work: Work | None = None,
    step: str = "calibrate",
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
        threads: how many threads work in all; None takes every core this process may use.
        work: other processes or machines to share the samples with, and a memory of finished shards.
        step: the name that the shards are remembered under.

    Raises:
        ModelError: a requested tensor is not in the graph or is constant, or the model does not run.
        DataError: there are no samples, one does not fit, or a tensor is not finite.
    """
    start = time.perf_counter()
    ordered = {name: requests[name] for name in _topological(model, requests)}
    if work is not None and not work.alone:
        found = collect_shards(model, ordered, samples, keep=keep, work=work, step=step, progress=progress)
        if not found.seen:
            raise _nothing()
        wall = time.perf_counter() - start
        kept = KeptSamples(found.inputs), KeptSamples(found.outputs)
        return Collected(found.stats, found.seen, *kept, found.digest, found.seconds, wall)
    asked = threads if threads is not None or work is None else work.threads
    cores = usable_cores() if asked is None else max(1, asked)
    digest = SampleDigest()
    iterator = enumerate(_owned(digest.watch(samples)))
    # Looking ahead tells whether there are enough samples to keep every core busy with one of its own.
    ahead = list(itertools.islice(iterator, cores))
    if not ahead:
        raise _nothing()
    fed = {value.name for value in model.graph.inputs}
    computed = [name for name in ordered if name not in fed]
    extremes = {name for name, kind in ordered.items() if kind is StatKind.MINMAX}
    runner = Runner(
        model,
        computed,
        ahead[0][1],
        cores=cores,
        samples=len(ahead),
        extremes=extremes,
        device=None if work is None else work.device,
    )
    shards = [ObservedShard(ordered) for _ in range(runner.workers)]
    inputs, outputs = KeptSamples(), KeptSamples()
    seen, seconds = 0, 0.0
    for index, sample, result in _in_order(runner, shards, itertools.chain(ahead, iterator), keep):
        if index < keep:
            inputs.append(sample)
        if result.outputs is not None:
            outputs.append(result.outputs)
        seen, seconds = seen + 1, seconds + result.seconds
        if seen % _TIDY == 0:
            give_memory_back()
        if progress is not None:
            progress(index + 1)
    for shard in shards[1:]:
        shards[0].merge(shard)
    return Collected(
        stats=shards[0].in_sample_order(),
        samples_seen=seen,
        inputs=inputs,
        outputs=outputs,
        data_digest=digest.hexdigest(),
        forward_seconds=seconds,
        wall_seconds=time.perf_counter() - start,
    )


def _in_order(
    runner: Runner, shards: list[ObservedShard], samples: Iterator[tuple[int, Sample]], keep: int
) -> Iterator[tuple[int, Sample, ShardSeen]]:
    """Results in sample order, while as many samples as there are shards run at once."""
    free: SimpleQueue[ObservedShard] = SimpleQueue()
    for shard in shards:
        free.put(shard)

    def work(index: int, sample: Sample) -> ShardSeen:
        shard = free.get()
        try:
            return shard.take(runner, sample, index, finals=index < keep)
        finally:
            free.put(shard)

    waiting: deque[tuple[int, Sample, Future[ShardSeen]]] = deque()
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


def _owned(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Copies: a reader may reuse its arrays while earlier samples still run."""
    for sample in samples:
        yield {name: np.array(array) for name, array in sample.items()}


def _nothing() -> DataError:
    return DataError("There are no calibration samples.", hint="Give at least one; 100 are usual.")


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
