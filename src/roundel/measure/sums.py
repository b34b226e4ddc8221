"""The figures of one tensor: sums over samples, from which every difference follows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from roundel.measure.types import ChannelError, CoarseHistogram, Difference, TensorStorage
from roundel.numerics.histogram import Histogram, as_real
from roundel.numerics.metrics import Closeness
from roundel.types import Array, Arrays, Doubles

HISTOGRAM_BINS = 64
HISTOGRAM_VALUES = 1 << 15
"""The most values of one sample that a histogram counts: all the bars need, for a third of the time."""

WORST_CHANNELS = 3
_GAPS = ("total", "introduced", "inherited", "rounding")
_COUNTS = ("saturated", "count", "same_top", "rows")


@dataclass(slots=True, eq=False)
class Gap:
    """Sums over pairs of arrays: of all values, and the error power of each channel."""

    sums: Closeness = field(default_factory=Closeness)
    noise: Doubles = field(default_factory=lambda: np.zeros(0))

    def merge(self, more: Gap) -> None:
        """Add another sample."""
        self.sums = self.sums.merge(more.sums)
        self.noise = more.noise if not self.noise.size else self.noise + more.noise

    @property
    def difference(self) -> Difference | None:
        """As the report has it; None where nothing was compared."""
        s = self.sums
        return Difference(s.sqnr_db, s.cosine, s.noise / s.count, s.worst) if s.count else None


@dataclass(slots=True, eq=False)
class TensorSums:
    """What a stream of samples says of one point; of an output that joins several things, of each part."""

    shape: tuple[int, ...] = ()
    total: Gap = field(default_factory=Gap)
    introduced: Gap = field(default_factory=Gap)
    inherited: Gap = field(default_factory=Gap)
    rounding: Gap = field(default_factory=Gap)
    signal: Doubles = field(default_factory=lambda: np.zeros(0))
    low: float = math.inf
    high: float = -math.inf
    saturated: int = 0
    count: int = 0
    same_top: int = 0
    rows: int = 0
    histogram: Histogram = field(default_factory=Histogram)
    broken: bool = False
    parts: dict[str, Closeness] = field(default_factory=dict)

    def merge(self, more: TensorSums) -> None:
        """Add another sample."""
        self.shape = self.shape or more.shape
        for name in _GAPS:
            getattr(self, name).merge(getattr(more, name))
        self.signal = more.signal if not self.signal.size else self.signal + more.signal
        self.low, self.high = min(self.low, more.low), max(self.high, more.high)
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(more, name))
        self.histogram.merge(more.histogram)
        self.broken = self.broken or more.broken
        for name, sums in more.parts.items():
            self.parts[name] = self.parts.get(name, Closeness()).merge(sums)

    def arrays(self) -> Arrays:
        """Plain arrays that `from_arrays` reads back."""
        gaps: Sequence[Gap] = [getattr(self, name) for name in _GAPS]
        return {
            "gaps": Closeness.table(gap.sums for gap in gaps),
            **{f"noise_{name}": gap.noise for name, gap in zip(_GAPS, gaps, strict=True)},
            "signal": self.signal,
            "ends": np.array([self.low, self.high], np.float64),
            "counts": np.array([getattr(self, name) for name in _COUNTS], np.int64),
            "shape": np.array(self.shape, np.int64),
            "broken": np.array(self.broken),
            "part_names": np.array(list(self.parts), np.str_),
            "parts": Closeness.table(self.parts.values()),
            **self.histogram.state(),
        }

    @staticmethod
    def from_arrays(arrays: Mapping[str, Array]) -> TensorSums:
        """The inverse of `arrays`."""
        made = TensorSums(shape=tuple(arrays["shape"].tolist()), signal=arrays["signal"])
        for name, sums in zip(_GAPS, Closeness.rows(arrays["gaps"]), strict=True):
            setattr(made, name, Gap(sums, arrays[f"noise_{name}"]))
        for name, count in zip(_COUNTS, arrays["counts"].tolist(), strict=True):
            setattr(made, name, count)
        made.low, made.high = arrays["ends"].tolist()
        made.broken = bool(arrays["broken"])
        names, rows = arrays["part_names"].tolist(), arrays["parts"]
        made.parts = dict(zip(names, Closeness.rows(rows), strict=True)) if names else {}
        made.histogram = Histogram.from_state(arrays)
        return made


def measure(
    arrays: tuple[Array, Array],
    alone: tuple[Array | None, Array | None],
    axis: int | None,
    storage: TensorStorage | None,
    *,
    classes: bool,
) -> TensorSums:
    """The sums of one sample's tensors of one point, all of one shape.

    Args:
        arrays: from the float model, and from the quantized model.
        alone: from its layer alone, on float inputs; and the float tensor, stored and restored.
        axis: of the channels, None for one channel.
        storage: how the tensor is stored, to count what it cuts off.
        classes: count the rows whose largest entry stays where it is.
    """
    shape = arrays[0].shape
    a, q = (_channelled(x, axis) for x in arrays)
    i, r = (None if x is None else _channelled(x, axis) for x in alone)
    sums = TensorSums(shape=shape, count=a.size)
    if not a.size:
        return sums
    sums.signal = _power(a)
    if not np.isfinite(sums.signal).all():  # masks of attention: minus infinity has no error to measure
        finite = np.isfinite(a)
        sums.count = int(np.count_nonzero(finite))
        i, r = (None if x is None else np.where(finite, x, 0) for x in (i, r))
        a, q = np.where(finite, a, 0), np.where(finite, q, 0)
        sums.signal = _power(a)
    sums.low, sums.high = float(a.min()), float(a.max())
    signal = float(sums.signal.sum())
    scratch = np.empty_like(a)
    sums.total = _gap(a, q, signal, scratch)
    if not math.isfinite(sums.total.sums.noise) and not np.isfinite(q).all():
        return TensorSums(shape=shape, count=sums.count, broken=True)
    if r is not None:
        sums.rounding = _gap(a, r, signal, scratch)
    if i is not None:
        sums.introduced = _gap(a, i, signal, scratch)
        sums.inherited = _gap(i, q, float(_power(i).sum()), scratch)
    # Values evenly apart: an odd step meets every column of a map of even width.
    spread = a.reshape(-1)[:: -(-a.size // HISTOGRAM_VALUES) | 1]
    sums.histogram.add(as_real(spread), max(abs(sums.low), abs(sums.high)))
    if storage is not None:
        sums.saturated = storage.beyond(arrays[0], sums.low, sums.high)
    if classes and len(shape) == 2 and shape[1] > 1:
        same = arrays[0].argmax(1) == arrays[1].argmax(1)
        sums.same_top, sums.rows = int(same.sum()), len(same)
    return sums


def channel_errors(noise: Doubles, signal: Doubles) -> tuple[ChannelError, ...]:
    """The channels with most of an error."""
    total = float(noise.sum())
    if noise.size < 2 or not total > 0:
        return ()
    worst = np.argsort(-noise, kind="stable")[:WORST_CHANNELS]
    return tuple(
        ChannelError(int(c), Closeness(float(signal[c]), float(noise[c])).sqnr_db, float(noise[c]) / total)
        for c in worst
        if noise[c] > 0
    )


def coarse_histogram(sums: TensorSums) -> CoarseHistogram:
    """The counts in a few bins of equal width."""
    low, high = (sums.low, sums.high) if sums.low <= sums.high else (0.0, 0.0)
    if low == high:
        return CoarseHistogram(low, high, (sums.count,))
    bins = sums.histogram.bins(low, high)
    counts, edges = np.histogram(bins.centres, HISTOGRAM_BINS, (low, high), weights=bins.counts)
    if bins.zeros:
        place = int(np.clip(np.searchsorted(edges, 0.0, side="right") - 1, 0, HISTOGRAM_BINS - 1))
        counts[place] += bins.zeros
    return CoarseHistogram(low, high, tuple(int(c) for c in counts))


def closeness(reference: Array, value: Array, axis: int | None) -> tuple[Gap, Doubles]:
    """The sums of one pair of arrays, and the power of each channel of the first."""
    a, b = _channelled(reference, axis), _channelled(value, axis)
    signal = _power(a)
    return _gap(a, b, float(signal.sum()), np.empty_like(a)), signal


def _channelled(array: Array, axis: int | None) -> Array:
    """(before, channels, behind), without a copy."""
    if axis is None:
        return array.reshape(1, 1, -1)
    before, behind = math.prod(array.shape[:axis]), math.prod(array.shape[axis + 1 :])
    return array.reshape(before, array.shape[axis], behind)


def _gap(a: Array, b: Array, signal: float, d: Array) -> Gap:
    """Sums of b against a. Cosine and norm follow from a.a, a.d and d.d, where rounding cancels.

    The difference is left in d.
    """
    np.subtract(b, a, out=d, dtype=a.dtype)
    noise = _power(d)
    along = float(np.vdot(a, d))
    if not math.isfinite(along):
        along = float(np.vdot(a.astype(np.float64), d.astype(np.float64)))
    worst = max(float(d.max()), -float(d.min()))
    whole = float(noise.sum())
    other = max(0.0, signal + 2 * along + whole)  # of silence, rounding may leave less than nothing
    sums = Closeness(signal, whole, signal + along, other, worst, a.size)
    return Gap(sums, noise)


def _power(a: Array) -> Doubles:
    """Sum of squares of each channel."""
    sums = np.einsum("acb,acb->c", a, a).astype(np.float64)
    if np.isfinite(sums).all():
        return np.asarray(sums)
    wide = a.astype(np.float64)
    return np.asarray(np.einsum("acb,acb->c", wide, wide))
