"""The part of a collection that one worker does: run a sample, observe it, remember which one it was."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.calibrate.observers import INFINITE, NonFiniteError, Observer, StatKind, new_observer
from roundel.calibrate.runner import Extremes, Runner
from roundel.data.shards import Reading, Shard
from roundel.errors import DataError, InfiniteTensorError
from roundel.model.files import Portable
from roundel.model.graph import fingerprint
from roundel.model.memory import Budget, budget, within
from roundel.types import Arrays, Sample


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
    return Runner(
        model,
        [name for name in requests if name not in fed],
        first,
        cores=cores,
        samples=samples,
        extremes={name for name, kind in requests.items() if kind is StatKind.MINMAX},
        device=device,
    )


class ObservedShard:
    """Observers of every requested tensor for the samples of one worker.

    Args:
        requests: the statistic for each tensor, in topological order of the tensors.
    """

    def __init__(self, requests: Mapping[str, StatKind]) -> None:
        self.stats: dict[str, Observer] = {name: new_observer(kind) for name, kind in requests.items()}
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
            _merge(observer, other.stats[name])
            self._positions[name] += other._positions[name]

    def state(self) -> Arrays:
        """The statistics as plain arrays. Tensor names may hold anything; a number stands for each."""
        observers = enumerate(self.stats.values())
        return {f"stat.{n}.{key}": array for n, each in observers for key, array in each.state().items()}

    def append(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Add the `state` of a worker whose samples follow those that were seen so far."""
        for number, observer in enumerate(self.stats.values()):
            prefix = f"stat.{number}."
            state = {k.removeprefix(prefix): a for k, a in arrays.items() if k.startswith(prefix)}
            _merge(observer, type(observer).from_state(state))

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


def _merge(into: Observer, other: Observer) -> None:
    if type(into) is not type(other):
        raise TypeError("observers of different kinds cannot be merged")
    into.merge(other)


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

    @classmethod
    def of(
        cls, model: ir.Model, requests: Mapping[str, StatKind], keep: int, first: Sample, device: int | None
    ) -> ShardTask:
        """The task of this process, to be sent to others."""
        return cls(Portable.of(model), dict(requests), keep, first, device, budget())

    def open(self, cores: int) -> _Opened:
        """Sessions for the model."""
        model = self.model.model()
        with within(self.memory):
            runner = open_runner(
                model, self.requests, self.first, cores=cores, samples=cores, device=self.device
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
        observed, total = ObservedShard(self.requests), 0.0
        arrays: Arrays = {}
        reading = None if part.files is None else Reading(part.files)
        for index, sample in enumerate(reading or part.samples, part.first):
            if reading is not None and index < self.keep:
                arrays |= {f"in.{index}.{name}": array for name, array in sample.items()}
            outputs, seconds = observed.take(self.runner, sample, index, finals=index < self.keep)
            total += seconds
            arrays |= {f"out.{index}.{name}": array for name, array in outputs.items()}
        if reading is not None:
            arrays |= reading.told()
        return arrays | observed.state() | {"seconds": np.array(total)}


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
