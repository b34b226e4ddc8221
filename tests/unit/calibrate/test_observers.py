from __future__ import annotations

import numpy as np
import pytest

from roundel.calibrate.observers import (
    OBSERVERS,
    HistogramObserver,
    MinMaxObserver,
    NonFiniteError,
    StatKind,
)


def feed(observer: MinMaxObserver, *samples: object) -> MinMaxObserver:
    for sample in samples:
        observer.update(np.asarray(sample, np.float32))
    return observer


def test_extremes_mean_and_moving_average() -> None:
    seen = feed(MinMaxObserver(), [-1, 2], [-3, 4], [0, 9])
    assert (seen.low, seen.high, seen.count) == (-3, 9, 6)
    assert seen.mean() == pytest.approx((-4 / 3, 5))
    # -1 -> -1 + .5 * (-3 + 1) = -2 -> -2 + .5 * 2 = -1 ; 2 -> 3 -> 6
    assert seen.moving_average(0.5) == (-1.0, 6.0)
    assert seen.moving_average(1.0) == (0.0, 9.0)
    assert seen.moving_average(0.01) != seen.moving_average(0.5)


def test_nothing_seen_is_an_empty_range() -> None:
    for kind in StatKind:
        seen = feed(OBSERVERS[kind](), np.zeros((0, 3)))
        assert (seen.low, seen.high, seen.count) == (0.0, 0.0, 0)
        assert seen.mean() == seen.moving_average(0.1) == (0.0, 0.0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", StatKind)
def test_not_finite_values_are_refused_and_change_nothing(kind: StatKind, bad: float) -> None:
    observer = OBSERVERS[kind]()
    with pytest.raises(NonFiniteError, match=r"NaN|infinity"):
        feed(observer, [1, bad, 2])
    assert observer.count == 0


def test_half_zero_data_keeps_zeros_out_of_the_bins() -> None:
    values = np.maximum(np.random.default_rng(0).standard_normal(10_000), 0).astype(np.float32)
    seen = HistogramObserver()
    seen.update(values)
    bins = seen.bins()
    assert bins.zeros == int((values == 0).sum())
    assert bins.counts.sum() + bins.zeros == values.size
    assert bins.left[0] >= 0
    assert bins.right[-1] == float(values.max())


def test_a_tiny_first_sample_does_not_fix_the_width_and_bins_stay_bounded() -> None:
    seen = HistogramObserver()
    for magnitude in (0.0, 1e-6, 1e6):
        seen.update(np.linspace(-magnitude, magnitude, 1001, dtype=np.float32))
    assert seen.histogram.counts.size == 8192
    assert seen.histogram.width == 2.0**20 / 4096
    direct = HistogramObserver()
    direct.update(np.concatenate([np.linspace(-m, m, 1001, dtype=np.float32) for m in (1e6, 0.0, 1e-6)]))
    assert np.array_equal(seen.histogram.counts, direct.histogram.counts)
    assert seen.histogram.zeros == direct.histogram.zeros == 1001 + 2


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int32, np.uint8])
def test_other_types_count_as_their_values(dtype: type) -> None:
    values = np.array([0, 1, 2, 3, 100])
    a, b = HistogramObserver(), HistogramObserver()
    a.update(values.astype(dtype))
    b.update(values.astype(np.float32))
    assert np.array_equal(a.histogram.counts, b.histogram.counts)


@pytest.mark.parametrize("kind", StatKind)
@pytest.mark.parametrize("samples", [[], [[0.0, 0.0]], [[1.0, -2.5], [3.0]]])
def test_state_survives_a_round_trip(kind: StatKind, samples: list[list[float]]) -> None:
    seen = feed(OBSERVERS[kind](), *samples)
    back = type(seen).from_state(seen.state())
    assert (back.lows, back.highs, back.count) == (seen.lows, seen.highs, seen.count)
    if isinstance(seen, HistogramObserver) and isinstance(back, HistogramObserver):
        assert back.histogram.exponent == seen.histogram.exponent
        assert back.histogram.zeros == seen.histogram.zeros
        assert np.array_equal(back.histogram.counts, seen.histogram.counts)


def test_state_of_another_shape_is_refused() -> None:
    state = feed(HistogramObserver(), [1.0, 2.0]).state()
    with pytest.raises(ValueError, match="bins"):
        HistogramObserver.from_state(state | {"first": np.array(9000)})
    with pytest.raises(ValueError, match="extremes"):
        HistogramObserver.from_state(state | {"lows": np.zeros((2, 2))})
