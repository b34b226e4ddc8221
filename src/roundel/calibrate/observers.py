"""Streaming, mergeable statistics of one tensor; and those of a pass on disk: plain arrays, never pickle."""

from __future__ import annotations

import enum
import io
import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from roundel.data.arrayfiles import load_npz, npz_headers
from roundel.errors import DataError, OutputError
from roundel.numerics.histogram import Bins, Histogram, as_real
from roundel.numerics.scales import power_of_two_least_squares
from roundel.types import Array, Arrays, Doubles, QType, ScaleKind, Scheme, below

if TYPE_CHECKING:
    from roundel.calibrate.collect import Collected


class StatKind(enum.Enum):
    """What has to be known about a tensor before its range can be chosen."""

    MINMAX = "minmax"
    HISTOGRAM = "histogram"
    EXPONENTS = "exponents"


INFINITE = "infinity"


class NonFiniteError(ValueError):
    """An array holds NaN or infinity; the collector adds the tensor and the sample."""


class MinMaxObserver:
    """Extremes of every sample.

    Both ends are kept per sample (16 bytes), so that the mean and a moving average with any constant
    follow later from the same single pass. Samples without elements leave no entry.
    """

    __slots__ = ("count", "highs", "lows")
    kind: ClassVar[StatKind] = StatKind.MINMAX

    def __init__(self) -> None:
        self.lows: list[float] = []
        self.highs: list[float] = []
        self.count = 0

    @property
    def low(self) -> float:
        """Smallest value; 0 when nothing was seen."""
        return min(self.lows, default=0.0)

    @property
    def high(self) -> float:
        """Largest value; 0 when nothing was seen."""
        return max(self.highs, default=0.0)

    def update(self, array: Array) -> None:
        """Take in the tensor's value for one sample.

        Raises:
            NonFiniteError: the array holds NaN or infinity. The observer is unchanged.
        """
        self._take(as_real(array))

    def update_extremes(self, low: float, high: float, count: int) -> None:
        """Take in what the graph itself found about one sample."""
        self.lows.append(low + 0.0)
        self.highs.append(high + 0.0)
        self.count += count

    def merge(self, other: Self) -> None:
        """Append another observer's samples after this one's."""
        self.lows += other.lows
        self.highs += other.highs
        self.count += other.count

    def reorder(self, positions: list[int]) -> None:
        """Sort the samples' entries by the given positions, one for each entry."""
        order = np.argsort(positions, kind="stable")
        self.lows = [self.lows[i] for i in order]
        self.highs = [self.highs[i] for i in order]

    def mean(self) -> tuple[float, float]:
        """The mean over samples of the smallest and of the largest value."""
        if not self.lows:
            return 0.0, 0.0
        return float(np.mean(self.lows)), float(np.mean(self.highs))

    def moving_average(self, constant: float) -> tuple[float, float]:
        """Exponential moving average in sample order: new = old + constant * (sample - old)."""
        if not self.lows:
            return 0.0, 0.0
        ends = np.array([self.lows, self.highs])
        average = ends[:, 0]
        for sample in ends[:, 1:].T:
            average = average + constant * (sample - average)
        return float(average[0]), float(average[1])

    def state(self) -> Arrays:
        """Plain arrays that `from_state` reads back."""
        return {
            "lows": np.array(self.lows, np.float64),
            "highs": np.array(self.highs, np.float64),
            "count": np.array(self.count, np.int64),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Array]) -> Self:
        """The inverse of `state`.

        Raises:
            KeyError: an array is missing.
            ValueError: an array has another shape or type than `state` gives it.
        """
        lows, highs = state["lows"], state["highs"]
        if lows.ndim != 1 or lows.shape != highs.shape or lows.dtype.kind != "f" or highs.dtype.kind != "f":
            raise ValueError("the extremes are not two equally long lists of numbers")
        observer = cls()
        observer.lows, observer.highs = lows.tolist(), highs.tolist()
        observer.count = int(state["count"])
        return observer

    def _take(self, flat: NDArray[np.float32] | Doubles) -> tuple[float, float]:
        if flat.size == 0:
            return 0.0, 0.0
        # Adding zero turns -0.0 into 0.0; NaN survives min and max, so two passes check every element.
        low, high = float(flat.min()) + 0.0, float(flat.max()) + 0.0
        if not (np.isfinite(low) and np.isfinite(high)):
            raise NonFiniteError("NaN" if np.isnan(low) or np.isnan(high) else INFINITE)
        self.lows.append(low)
        self.highs.append(high)
        self.count += flat.size
        return low, high


class HistogramObserver(MinMaxObserver):
    """Extremes of every sample and the histogram of all values."""

    __slots__ = ("histogram",)
    kind: ClassVar[StatKind] = StatKind.HISTOGRAM

    def __init__(self) -> None:
        super().__init__()
        self.histogram = Histogram()

    def update(self, array: Array) -> None:
        """Take in the tensor's value for one sample.

        Raises:
            NonFiniteError: the array holds NaN or infinity. The observer is unchanged.
        """
        flat = as_real(array)
        low, high = self._take(flat)
        self.histogram.add(flat, max(abs(low), abs(high)))

    def merge(self, other: Self) -> None:
        """Append another observer's samples after this one's and add its counts."""
        super().merge(other)
        self.histogram.merge(other.histogram)

    def bins(self) -> Bins:
        """The occupied intervals for a threshold search."""
        return self.histogram.bins(self.low, self.high)

    def state(self) -> Arrays:
        """Plain arrays that `from_state` reads back."""
        return super().state() | self.histogram.state()

    @classmethod
    def from_state(cls, state: Mapping[str, Array]) -> Self:
        """The inverse of `state`.

        Raises:
            KeyError: an array is missing.
            ValueError: an array has another shape or type than `state` gives it.
        """
        observer = super().from_state(state)
        observer.histogram = Histogram.from_state(state)
        return observer


class ExponentObserver(HistogramObserver):
    """A histogram, and the exponent of the 8-bit power-of-two scale that each sample would choose."""

    __slots__ = ("exponents",)
    kind: ClassVar[StatKind] = StatKind.EXPONENTS
    _scheme: ClassVar[Scheme] = Scheme(QType.INT8, scale=ScaleKind.POWER_OF_TWO)

    def __init__(self) -> None:
        super().__init__()
        self.exponents: list[int] = []

    def update(self, array: Array) -> None:
        """Take in the tensor's value for one sample.

        Raises:
            NonFiniteError: the array holds NaN or infinity. The observer is unchanged.
        """
        alone = HistogramObserver()
        alone.update(array)
        super().merge(alone)  # type: ignore[arg-type]
        if alone.low < alone.high or alone.low != 0.0:
            scale = float(power_of_two_least_squares(alone.bins(), self._scheme).scale)
            self.exponents.append(math.frexp(scale)[1] - 1)

    def merge(self, other: Self) -> None:
        """Append another observer's samples after this one's."""
        super().merge(other)
        self.exponents += other.exponents

    def reorder(self, positions: list[int]) -> None:
        """Sort the samples' entries; of the exponents only how often each occurs counts."""
        super().reorder(positions)
        self.exponents.sort()

    def most_common(self) -> int:
        """The most frequent exponent; the largest of equally frequent ones, 0 when nothing was seen."""
        counts = Counter(self.exponents)
        return max(counts, key=lambda exponent: (counts[exponent], exponent), default=0)

    def state(self) -> Arrays:
        """Plain arrays that `from_state` reads back."""
        return super().state() | {"exponents": np.array(sorted(self.exponents), np.int64)}

    @classmethod
    def from_state(cls, state: Mapping[str, Array]) -> Self:
        """The inverse of `state`."""
        observer = super().from_state(state)
        exponents = state["exponents"]
        if exponents.ndim != 1 or exponents.dtype.kind != "i":
            raise ValueError("the exponents are not a list of whole numbers")
        observer.exponents = exponents.tolist()
        return observer


Observer = MinMaxObserver | HistogramObserver | ExponentObserver
OBSERVERS: Mapping[StatKind, type[Observer]] = {
    kind.kind: kind for kind in (MinMaxObserver, HistogramObserver, ExponentObserver)
}


_VERSION = 1
_MAX_BYTES = 4_000_000_000
_HEADER = "header"
# What json and the observers raise for content that is not ours.
_FOREIGN = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """What a statistics file holds.

    Attributes:
        stats: the observer of each tensor.
        samples_seen: number of samples they come from.
        model_key: fingerprint of the model that ran.
        data_key: digest of the samples.
    """

    stats: dict[str, Observer]
    samples_seen: int
    model_key: str
    data_key: str


def save_statistics(path: Path | str, collected: Collected, model_key: str) -> None:
    """Write the statistics, replacing the file in one step.

    Raises:
        OutputError: the file cannot be written.
    """
    header = {
        "version": _VERSION,
        "model_key": model_key,
        "data_key": collected.data_digest,
        "samples_seen": collected.samples_seen,
        "tensors": [[name, observer.kind.value] for name, observer in collected.stats.items()],
    }
    arrays: dict[str, Array] = {_HEADER: np.frombuffer(json.dumps(header).encode(), np.uint8)}
    for number, observer in enumerate(collected.stats.values()):
        # Tensor names may hold slashes and dots; inside the archive a number stands for each.
        arrays |= {f"{number}.{key}": array for key, array in observer.state().items()}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    _replace(Path(path), buffer.getvalue())


def load_statistics(path: Path | str) -> Statistics:
    """Read a statistics file.

    Raises:
        DataError: the file is missing, damaged, or of another version.
    """
    try:
        arrays = _arrays(Path(path))
        header = json.loads(arrays[_HEADER].tobytes())
        if header["version"] != _VERSION:
            raise DataError(
                "The statistics file has another version.",
                where=path,
                observed=header["version"],
                expected=_VERSION,
                hint="Give another file name: the statistics are gathered again and written there.",
            )
        stats = {
            str(name): OBSERVERS[StatKind(kind)].from_state(below(arrays, f"{number}."))
            for number, (name, kind) in enumerate(header["tensors"])
        }
        keys = str(header["model_key"]), str(header["data_key"])
        return Statistics(stats, int(header["samples_seen"]), *keys)
    except _FOREIGN as error:
        raise DataError(
            "This is not a statistics file, or a damaged one.",
            where=path,
            observed=f"{type(error).__name__}: {error}",
            expected="a file that an earlier run wrote",
            hint="Give another file name: the statistics are gathered again and written there.",
        ) from error


def _arrays(path: Path) -> dict[str, Array]:
    """What the archive holds, once its headers say that it is numbers, and not too many of them."""
    try:
        headers = npz_headers(path)
        needed = sum(header.nbytes for header in headers.values())
        if needed > _MAX_BYTES:
            raise ValueError(f"it unpacks to {needed} bytes")
        return load_npz(path, list(headers))
    except DataError as error:
        raise ValueError(error.observed) from error


def _replace(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            Path(name).replace(path)
        finally:
            Path(name).unlink(missing_ok=True)
    except OSError as error:
        raise OutputError("The statistics file cannot be written.", where=path, observed=error) from error
