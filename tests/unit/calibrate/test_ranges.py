from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from roundel.calibrate.observers import HistogramObserver, MinMaxObserver
from roundel.calibrate.ranges import (
    Distribution,
    Entropy,
    LayerWisePercentile,
    Method,
    MinMax,
    Mse,
    NonOverflow,
    Percentile,
    PowerOfTwoMse,
    choose,
    choose_weight,
)
from roundel.errors import RecipeError
from roundel.numerics.affine import fake_quantize, params_from_range, weight_params
from roundel.numerics.histogram import Scenario, bins_of, distribution, entropy, percentile
from roundel.numerics.scales import ErrorMetric, least_squares_range, quantization_error
from roundel.types import PerChannel, QParams, QType, ScaleKind, Scheme

INT8 = Scheme(QType.INT8)
UINT8 = Scheme(QType.UINT8, symmetric=False)
POWER = Scheme(QType.INT8, scale=ScaleKind.POWER_OF_TWO)
ALL: list[tuple[Method, Scheme]] = [
    *(
        (m, s)
        for s in (INT8, UINT8)
        for m in (MinMax(), MinMax("mean"), MinMax(0.1), Percentile(), Entropy())
    ),
    *(
        (m, s)
        for s in (INT8, UINT8)
        for m in (Distribution(), Distribution("p3"), LayerWisePercentile(), Mse())
    ),
    *((m, POWER) for m in (Mse(), PowerOfTwoMse(), NonOverflow(), MinMax(), Percentile(symmetric=False))),
    (Entropy(symmetric=False), UINT8),
]


@pytest.fixture(scope="module")
def gauss() -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal(100_000, dtype=np.float32)


def observed(*samples: NDArray[np.float32]) -> HistogramObserver:
    seen = HistogramObserver()
    for sample in samples:
        seen.update(sample)
    return seen


def squared(x: NDArray[np.float32], params: QParams) -> float:
    return float(((x - fake_quantize(x, params)).astype(np.float64) ** 2).sum())


# --- thresholds


def test_percentile_interpolates_inside_the_bin() -> None:
    bins = bins_of(np.linspace(0, 1, 100_001, dtype=np.float32))
    found = percentile(bins, 90.0, symmetric=True)
    assert found.low == 0.0
    assert found.high == pytest.approx(0.9, abs=1e-4)
    both = percentile(bins_of(np.linspace(-1, 3, 100_001, dtype=np.float32)), 90.0, symmetric=False)
    assert (both.low, both.high) == pytest.approx((-0.8, 2.8), abs=2e-3)


def test_percentile_of_magnitudes_is_cut_to_the_extremes(gauss: NDArray[np.float32]) -> None:
    for percent in (99.0, 99.99):
        expected = float(np.percentile(np.abs(gauss), percent))
        found = percentile(bins_of(gauss), percent, symmetric=True)
        assert found.high == pytest.approx(expected, rel=5e-3)
        assert found.low == pytest.approx(-expected, rel=5e-3)
    relu = percentile(bins_of(np.maximum(gauss, 0)), 99.9, symmetric=True)
    assert relu.low == 0.0
    assert relu.high == pytest.approx(float(np.percentile(np.maximum(gauss, 0), 99.9)), rel=5e-3)
    whole = percentile(bins_of(gauss), 100.0, symmetric=False)
    assert (whole.low, whole.high) == pytest.approx((float(gauss.min()), float(gauss.max())))


@pytest.mark.parametrize("symmetric", [True, False])
def test_entropy_cuts_an_outlier(gauss: NDArray[np.float32], symmetric: bool) -> None:
    bins = bins_of(np.append(gauss, np.float32(30)))
    found = entropy(bins, levels=128 if symmetric else 256, symmetric=symmetric)
    assert 3.0 < found.high < 6.0
    assert -6.0 < found.low < -3.0


def test_entropy_cuts_nothing_of_a_flat_distribution() -> None:
    values = np.random.default_rng(1).uniform(-2, 2, 200_000).astype(np.float32)
    found = entropy(bins_of(values), levels=128, symmetric=True)
    assert found.high > 1.95
    assert found.low < -1.95


@pytest.mark.parametrize("scenario", Scenario)
def test_distribution_gives_a_gaussian_four_deviations(
    gauss: NDArray[np.float32], scenario: Scenario
) -> None:
    found = distribution(bins_of(gauss), scenario)
    assert found.high == pytest.approx(4.0, rel=0.02)
    assert found.low == pytest.approx(-4.0, rel=0.02)
    relu = distribution(bins_of(np.maximum(gauss, 0)), scenario)
    assert relu.low == 0.0
    assert relu.high == pytest.approx(4.0, rel=0.02)


# --- errors and scale searches


@pytest.mark.parametrize("qtype", [QType.INT8, QType.UINT8, QType.INT16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shrink", [1.0, 0.4])
def test_modelled_error_is_the_true_error(
    gauss: NDArray[np.float32], qtype: QType, symmetric: bool, shrink: float
) -> None:
    scheme = Scheme(qtype, symmetric)
    values = np.maximum(gauss * np.float32(0.7) + np.float32(0.3), 0) - np.maximum(-gauss, 0)
    params = params_from_range(float(values.min()) * shrink, float(values.max()) * shrink, scheme)
    assert quantization_error(bins_of(values), params) == pytest.approx(squared(values, params), rel=0.02)
    absolute = float(np.abs(values - fake_quantize(values, params)).astype(np.float64).sum())
    modelled = quantization_error(bins_of(values), params, ErrorMetric.MAE)
    assert modelled == pytest.approx(absolute, rel=0.02)


@pytest.mark.parametrize("scheme", [INT8, UINT8, Scheme(QType.UINT8)])
def test_least_squares_is_near_the_best_of_a_fine_grid(gauss: NDArray[np.float32], scheme: Scheme) -> None:
    for values in (gauss, np.append(gauss, np.float32(30)), np.maximum(gauss, 0)):
        found = least_squares_range(bins_of(values), scheme)
        error = squared(values, params_from_range(found.low, found.high, scheme))
        low, high = float(values.min()), float(values.max())
        grid = [
            squared(values, params_from_range(low * f, high * f, scheme)) for f in np.linspace(0.1, 1, 40)
        ]
        assert error <= min(grid) * 1.01


@pytest.mark.parametrize("scheme", [POWER, Scheme(QType.UINT8, True, ScaleKind.POWER_OF_TWO)])
def test_power_of_two_finds_the_best_exponent(gauss: NDArray[np.float32], scheme: Scheme) -> None:
    for factor in (1e-3, 1.0, 77.0):
        values = gauss * np.float32(factor)
        found = choose(PowerOfTwoMse(), observed(values), scheme)
        errors = {
            e: squared(values, QParams(np.float32(2.0**e), found.zero_point, scheme.qtype))
            for e in range(-24, 8)
        }
        assert float(found.scale) == 2.0 ** min(errors, key=lambda e: errors[e])
    assert int(found.zero_point) == (0 if scheme.qtype.signed else 128)


def test_asymmetric_power_of_two_uses_its_zero_point(gauss: NDArray[np.float32]) -> None:
    scheme = Scheme(QType.UINT8, False, ScaleKind.POWER_OF_TWO)
    relu = np.maximum(gauss, 0)
    found = choose(PowerOfTwoMse(), observed(relu), scheme)
    assert int(found.zero_point) == 0
    assert float(found.scale) == 2.0**-6


def test_non_overflow_rounds_the_scale_up() -> None:
    # 1.3 / 127 lies nearer to 2**-7 than to 2**-6 in the logarithm, but 127 * 2**-7 < 1.3.
    seen = MinMaxObserver()
    seen.update(np.array([-1.0, 1.3], np.float32))
    assert float(choose(NonOverflow(), seen, POWER).scale) == 2.0**-6
    assert float(choose(MinMax(), seen, POWER).scale) == 2.0**-7
    # -128 is a code of activations, so the lower end may use it; weights leave it out.
    assert float(choose_weight(NonOverflow(), np.float32([-128, 5]), POWER).scale) == 2.0
    seen = MinMaxObserver()
    seen.update(np.array([-128.0, 5.0], np.float32))
    assert float(choose(NonOverflow(), seen, POWER).scale) == 1.0


def test_layerwise_percentile_takes_the_candidate_with_the_least_error(gauss: NDArray[np.float32]) -> None:
    seen = observed(np.append(gauss, np.float32(30)))
    for metric in ("mae", "mse"):
        chosen = choose(LayerWisePercentile((99.0, 99.99, 100.0), metric), seen, INT8)
        options = {p: choose(Percentile(p), seen, INT8) for p in (99.0, 99.99, 100.0)}
        errors = {p: quantization_error(seen.bins(), q, ErrorMetric(metric)) for p, q in options.items()}
        assert chosen.same_as(options[min(errors, key=lambda p: errors[p])])


# --- choose


def test_minmax_variants() -> None:
    seen = observed(np.float32([-1, 1]), np.float32([-3, 5]))
    assert choose(MinMax(), seen, UINT8).same_as(params_from_range(-3, 5, UINT8))
    assert choose(MinMax("mean"), seen, UINT8).same_as(params_from_range(-2, 3, UINT8))
    assert choose(MinMax(0.25), seen, UINT8).same_as(params_from_range(-1.5, 2, UINT8))


@pytest.mark.parametrize(("method", "scheme"), ALL)
def test_zero_tensor_single_value_and_nothing_at_all(method: Method, scheme: Scheme) -> None:
    for seen in (observed(np.zeros(8, np.float32)), observed(), observed(np.zeros((0, 2), np.float32))):
        params = choose(method, seen, scheme)
        assert float(params.scale) == 1.0
        assert fake_quantize(np.zeros(1, np.float32), params)[0] == 0.0
    for value in (3.0, -0.37, 1e-30, 1e30):
        params = choose(method, observed(np.full(5, value, np.float32)), scheme)
        back = float(fake_quantize(np.array([value], np.float32), params)[0])
        # The nearest power of two may lie below what the range needs: up to a clipped share of 1 - 1/sqrt 2.
        loose = scheme is POWER and isinstance(method, MinMax | Percentile)
        assert back == pytest.approx(value, rel=0.3 if loose else 0.01)


@pytest.mark.parametrize(("method", "scheme"), ALL)
def test_the_result_does_not_depend_on_the_split(
    method: Method, scheme: Scheme, gauss: NDArray[np.float32]
) -> None:
    if isinstance(method, MinMax) and method.moving_average is not None:
        pytest.skip("a mean over samples depends on what a sample is")
    values = gauss[:5000]
    parts = [observed(part) for part in np.split(values[::-1], [1, 70, 3000])]
    for part in parts[1:]:
        parts[0].merge(part)
    assert choose(method, parts[0], scheme).same_as(choose(method, observed(values), scheme))


def test_a_method_refuses_what_it_cannot_use() -> None:
    with pytest.raises(RecipeError, match="powers of two"):
        choose(NonOverflow(), observed(np.ones(1, np.float32)), INT8)
    with pytest.raises(RecipeError, match="powers of two"):
        choose_weight(PowerOfTwoMse(), np.ones(3, np.float32), INT8)
    with pytest.raises(TypeError, match="histogram"):
        choose(Mse(), MinMaxObserver(), INT8)


# --- weights


@pytest.mark.parametrize("qtype", [QType.INT8, QType.UINT8])
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_weight_search_is_never_worse_than_minmax(qtype: QType, axis: int | None) -> None:
    rng = np.random.default_rng(3)
    normal = rng.standard_normal((8, 6, 30, 30)).astype(np.float32)
    heavy = rng.standard_t(3, (8, 6, 3, 3)).astype(np.float32)
    for symmetric in (True, False):
        scheme = Scheme(qtype, symmetric)
        if axis is not None:
            scheme = Scheme(qtype, symmetric, granularity=PerChannel(axis))
        for weight in (normal, heavy):
            plain, best = weight_params(weight, scheme), choose_weight(Mse(), weight, scheme)
            assert best.scale.shape == plain.scale.shape
            assert best.axis == plain.axis
            assert squared(weight, best) <= squared(weight, plain)
            if weight is normal:
                assert squared(weight, best) < squared(weight, plain)


def test_weight_search_is_near_the_best_of_a_fine_grid() -> None:
    weight = np.random.default_rng(6).standard_normal(20_000).astype(np.float32)
    for scheme in (INT8, UINT8):
        low, high = float(weight.min()), float(weight.max())
        tried = [params_from_range(low * f, high * f, scheme) for f in np.linspace(0.3, 1, 71)]
        *grid, found = (
            float(
                ((weight - fake_quantize(weight, p, narrow=scheme.symmetric)).astype(np.float64) ** 2).sum()
            )
            for p in (*tried, choose_weight(Mse(), weight, scheme))
        )
        assert found <= min(grid) * 1.005


def test_per_channel_power_of_two_weights_match_a_search_over_each_channel() -> None:
    rng = np.random.default_rng(4)
    weight = (rng.standard_normal((5, 40)) * np.exp2(np.arange(5))[:, None]).astype(np.float32)
    weight[2] = 0
    scheme = Scheme(QType.INT8, scale=ScaleKind.POWER_OF_TWO, granularity=PerChannel(0))
    found = choose_weight(PowerOfTwoMse(), weight, scheme)
    assert found.axis == 0
    for row, scale in zip(weight, found.scale, strict=True):
        if not row.any():
            assert scale == 1.0
            continue
        errors = {}
        for e in range(4, -20, -1):
            q = QParams(np.float32(2.0**e), np.int8(0), QType.INT8)
            errors[e] = float(((row - fake_quantize(row, q, narrow=True)) ** 2).sum())
        assert scale == 2.0 ** min(errors, key=lambda e: errors[e])


@pytest.mark.parametrize(("method", "scheme"), ALL)
def test_every_method_works_on_weights(method: Method, scheme: Scheme) -> None:
    weight = np.random.default_rng(5).standard_normal((4, 50)).astype(np.float32)
    each = Scheme(scheme.qtype, scheme.symmetric, scheme.scale, PerChannel(1))
    assert choose_weight(method, weight, each).scale.shape == (50,)
    assert choose_weight(method, weight, scheme).scale.shape == ()
    assert choose_weight(method, np.zeros((0,), np.float32), scheme).scale == 1.0


def test_large_tensors_use_the_histogram_with_the_same_quality(gauss: NDArray[np.float32]) -> None:
    small, large = choose_weight(Mse(), gauss[:60_000], INT8), choose_weight(Mse(), gauss, INT8)
    assert float(large.scale) == pytest.approx(float(small.scale), rel=0.05)
    assert squared(gauss, large) < squared(gauss, weight_params(gauss, INT8))
