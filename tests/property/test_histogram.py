"""The histogram's counts depend on the values alone: not on order, split, merging or the first sample."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from roundel.numerics.affine import code_limits
from roundel.numerics.histogram import HALF, Histogram, bins_of
from roundel.numerics.scales import non_overflow, power_of_two_least_squares, quantization_error
from roundel.types import QType, ScaleKind, Scheme

floats32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
usual = st.floats(-100, 100, width=32)
representable = st.floats(-(2.0**126), 2.0**126, width=32)  # beyond, a symmetric range would end in infinity
arrays = st.lists(floats32 | usual, max_size=60).map(lambda v: np.array(v, np.float32))


def counted(*parts: NDArray[np.float32]) -> Histogram:
    histogram = Histogram()
    for part in parts:
        if part.size:
            histogram.add(part, float(np.abs(part).max()))
    return histogram


def same(a: Histogram, b: Histogram) -> bool:
    return a.exponent == b.exponent and a.zeros == b.zeros and np.array_equal(a.counts, b.counts)


@given(arrays, st.data())
def test_any_split_and_order_gives_the_identical_histogram(
    values: NDArray[np.float32], data: st.DataObject
) -> None:
    whole = counted(values)
    shuffled = values[data.draw(st.permutations(range(values.size)))] if values.size else values
    cuts = sorted(data.draw(st.lists(st.integers(0, values.size), max_size=4)))
    assert same(whole, counted(*np.split(shuffled, cuts)))


@given(arrays, arrays, arrays)
def test_merging_is_exact_and_associative(
    a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[np.float32]
) -> None:
    left = counted(a)
    left.merge(counted(b))
    left.merge(counted(c))
    right, tail = counted(c), counted(b)
    tail.merge(counted(a))
    right.merge(tail)
    assert same(left, right)
    assert same(left, counted(np.concatenate([a, b, c])))


@given(arrays)
def test_every_value_is_counted_in_the_bin_that_holds_it(values: NDArray[np.float32]) -> None:
    histogram = counted(values)
    assert histogram.counts.size == 2 * HALF
    assert histogram.counts.min() >= 0
    assert int(histogram.counts.sum()) + histogram.zeros == values.size
    assert histogram.zeros == int((values == 0).sum())
    if histogram.exponent is not None:
        wide = values[values != 0].astype(np.float64)
        expected = np.floor(wide * math.ldexp(1.0, -histogram.exponent)).astype(int) + HALF
        assert np.array_equal(histogram.counts, np.bincount(expected, minlength=2 * HALF))


@pytest.mark.parametrize("qtype", [QType.INT8, QType.UINT8, QType.INT16, QType.UINT16])
@pytest.mark.parametrize("symmetric", [True, False])
@given(ends=st.tuples(usual | representable, usual | representable), narrow=st.booleans())
def test_non_overflow_never_clips_and_is_the_smallest(
    qtype: QType, symmetric: bool, ends: tuple[float, float], narrow: bool
) -> None:
    low, high = min(*ends, 0.0), max(*ends, 0.0)
    scheme = Scheme(qtype, symmetric, ScaleKind.POWER_OF_TWO)
    params = non_overflow(low, high, scheme, narrow=narrow)
    scale, zero = float(params.scale), int(params.zero_point)
    first = qtype.qmin + (narrow and qtype.signed)
    assert math.frexp(scale)[0] == 0.5
    assert (first - zero) * scale <= low
    assert high <= (qtype.qmax - zero) * scale
    if low < high and scale > 2.0**-126:
        codes = qtype.qmax - first
        if symmetric:
            middle = (qtype.qmax + 1) // 2 if not qtype.signed else 0
            assert (first - middle) * scale / 2 > low or (qtype.qmax - middle) * scale / 2 < high
        else:
            # At half the scale the codes do not suffice; one may be lost to a whole zero point.
            assert (codes - 1) * scale / 2 < high - low


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.sampled_from([QType.INT8, QType.UINT8]))
def test_power_of_two_search_beats_the_five_reference_candidates(seed: int, qtype: QType) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.standard_t(3, 2000) * np.exp2(rng.integers(-8, 8))).astype(np.float32)
    bins = bins_of(values)
    scheme = Scheme(qtype, True, ScaleKind.POWER_OF_TWO)
    best = power_of_two_least_squares(bins, scheme)
    error = quantization_error(bins, best)
    start = round(math.log2(2 * bins.absmax / (code_limits(scheme)[1] - code_limits(scheme)[0])))
    for exponent in range(start - 3, start + 2):
        other = type(best)(np.float32(2.0**exponent), best.zero_point, qtype)
        assert error <= quantization_error(bins, other)
