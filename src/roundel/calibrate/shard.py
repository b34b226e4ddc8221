"""The part of a collection that one worker does: run a sample, observe it, remember which one it was."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundel.calibrate.observers import INFINITE, NonFiniteError, Observer, StatKind, new_observer
from roundel.calibrate.runner import Extremes, Runner
from roundel.errors import DataError, InfiniteTensorError
from roundel.types import Sample


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What one sample leaves behind, beside the statistics."""

    outputs: Sample | None
    seconds: float


class Shard:
    """Observers of every requested tensor for the samples of one worker.

    Args:
        requests: the statistic for each tensor, in topological order of the tensors.
    """

    def __init__(self, requests: Mapping[str, StatKind]) -> None:
        self.stats: dict[str, Observer] = {name: new_observer(kind) for name, kind in requests.items()}
        self._positions: dict[str, list[int]] = defaultdict(list)

    def take(self, runner: Runner, sample: Sample, index: int, *, finals: bool) -> Seen:
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
        return Seen(outputs, seconds)

    def merge(self, other: Shard) -> None:
        """Add another worker's samples."""
        for name, observer in self.stats.items():
            _merge(observer, other.stats[name])
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


def _merge(into: Observer, other: Observer) -> None:
    if type(into) is not type(other):
        raise TypeError("observers of different kinds cannot be merged")
    into.merge(other)
