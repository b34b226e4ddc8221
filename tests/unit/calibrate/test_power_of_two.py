"""Power-of-two scales: nothing saturates, or the squared error is the least there is."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from helpers import activations, build, node, normal, quantize, weights
from roundel.calibrate.observers import ExponentObserver, HistogramObserver, MinMaxObserver
from roundel.calibrate.ranges import (
    MostCommonPowerOfTwo,
    Mse,
    NonOverflow,
    PowerOfTwoMse,
    choose,
    choose_weight,
)
from roundel.errors import RecipeError
from roundel.numerics.affine import dequantize
from roundel.numerics.histogram import bins_of
from roundel.numerics.scales import non_overflow, power_of_two_least_squares, weight_power_of_two
from roundel.types import QParams, QType, ScaleKind, Scheme

INT8 = Scheme(QType.INT8, scale=ScaleKind.POWER_OF_TWO)
UINT8 = Scheme(QType.UINT8, scale=ScaleKind.POWER_OF_TWO)
SHAPE = [1, 2, 8, 8]


def distribution(name: str) -> NDArray[np.float32]:
    rng = np.random.default_rng(5)
    drawn = {
        "gauss": rng.normal(0, 0.7, 20_000),
        "relu": np.maximum(rng.normal(0, 3, 20_000), 0),
        "laplace": rng.laplace(0, 2, 20_000),
        "uniform": rng.uniform(-5, 5, 20_000),
        "outlier": np.append(rng.normal(0, 0.01, 20_000), 37.3),
        "tiny": rng.normal(0, 1e-7, 20_000),
    }
    return drawn[name].astype(np.float32)


def exponent(params: QParams) -> int:
    mantissa, found = np.frexp(float(params.scale))
    assert mantissa == 0.5
    return int(found) - 1


def squared_error(x: NDArray[np.float32], power: int, lowest: int) -> float:
    wide = x.astype(np.float64)
    codes = np.clip(np.rint(np.ldexp(wide, -power)), lowest, 127)
    return float(((np.ldexp(codes, power) - wide) ** 2).sum())


def brute_force(x: NDArray[np.float32], lowest: int) -> int:
    """The exponent with the least squared error on the values themselves; the larger of equals."""
    return min(range(20, -50, -1), key=lambda power: squared_error(x, power, lowest))


def observed(kind: type[Any], *samples: NDArray[np.float32]) -> Any:
    observer = kind()
    for sample in samples:
        observer.update(sample)
    return observer


@pytest.mark.parametrize("scheme", [INT8, UINT8])
@given(low=st.floats(-(2.0**100), 2.0**100, width=32), high=st.floats(-(2.0**100), 2.0**100, width=32))
def test_non_overflow_holds_everything_and_no_more(scheme: Scheme, low: float, high: float) -> None:
    ends = np.array([low, high], np.float32)
    if np.abs(ends).max() < 1e-30:
        return
    for params, lowest in (
        (choose(NonOverflow(), observed(MinMaxObserver, ends), scheme), -128),
        (choose_weight(NonOverflow(), ends, scheme), -127 if scheme is INT8 else -128),
    ):
        wide = ends.astype(np.float64)
        codes = np.ldexp(wide, -exponent(params))
        assert lowest <= codes.min()
        assert codes.max() <= 127
        finer = 2 * codes
        assert finer.min() < lowest or finer.max() > 127
        assert params.zero_point == (0 if scheme is INT8 else 128)


@pytest.mark.parametrize("scheme", [INT8, UINT8])
@pytest.mark.parametrize("name", ["gauss", "relu", "laplace", "uniform", "outlier", "tiny"])
def test_least_squares_is_that_of_brute_force(name: str, scheme: Scheme) -> None:
    x = distribution(name)
    from_histogram = choose(Mse(), observed(HistogramObserver, x), scheme)
    assert exponent(from_histogram) == brute_force(x, -128)
    assert exponent(choose_weight(Mse(), x, scheme)) == brute_force(x, -127 if scheme is INT8 else -128)


@given(st.integers(0, 2**16), st.floats(-6, 4), st.integers(1, 200))
def test_least_squares_of_small_weights(seed: int, size: float, count: int) -> None:
    x = (np.random.default_rng(seed).standard_normal(count) * 10.0**size).astype(np.float32)
    found, best = exponent(choose_weight(Mse(), x, INT8)), brute_force(x, -127)
    # The search rounds in float32: of two equally good exponents it may see the other one ahead.
    assert squared_error(x, found, -127) <= squared_error(x, best, -127) * (1 + 1e-5)


@pytest.mark.parametrize("method", [Mse(), NonOverflow()])
def test_zeros_get_scale_one(method: Any) -> None:
    zeros = np.zeros(8, np.float32)
    kind = HistogramObserver if isinstance(method, Mse) else MinMaxObserver
    assert exponent(choose(method, observed(kind, zeros), UINT8)) == 0
    assert exponent(choose_weight(method, zeros, INT8)) == 0


def test_percentile_searches_without_the_tail() -> None:
    x = distribution("outlier")
    calm = x[np.abs(x) <= np.quantile(np.abs(x), 0.99)]
    stat = observed(HistogramObserver, x)
    assert exponent(choose(PowerOfTwoMse(99), stat, INT8)) == brute_force(calm, -128)
    assert exponent(choose(PowerOfTwoMse(), stat, INT8)) == brute_force(x, -128)
    assert brute_force(x, -128) > brute_force(calm, -128)


def test_most_common_is_a_vote_of_the_samples() -> None:
    small, large = distribution("gauss"), 64 * distribution("gauss")
    stat = observed(ExponentObserver, small, large, small)
    assert stat.exponents == [brute_force(small, -128), brute_force(large, -128), brute_force(small, -128)]
    assert exponent(choose(MostCommonPowerOfTwo(), stat, UINT8)) == brute_force(small, -128)
    stat.update(large)  # of equally frequent ones the larger scale
    assert exponent(choose(MostCommonPowerOfTwo(), stat, UINT8)) == brute_force(large, -128)


def test_samples_of_zeros_do_not_vote() -> None:
    zeros = np.zeros(4, np.float32)
    stat = observed(ExponentObserver, zeros, zeros, distribution("gauss"))
    assert stat.most_common() == brute_force(distribution("gauss"), -128)
    assert observed(ExponentObserver, zeros).most_common() == 0


@pytest.mark.parametrize("method", [NonOverflow(), MostCommonPowerOfTwo(), PowerOfTwoMse()])
def test_other_scales_are_refused(method: Any) -> None:
    with pytest.raises(RecipeError, match="powers of two"):
        choose(method, observed(ExponentObserver, distribution("gauss")), Scheme(QType.INT8))


@pytest.mark.parametrize(
    ("calibration", "samples"),
    [
        ({"mode": "all"}, "all"),
        ({"mode": "most_common"}, "one"),
        ({"mode": "percentile", "percentile": 90}, "cut"),
        ({"method": "minmax"}, "whole"),
    ],
)
def test_modes_of_the_recipe(calibration: dict[str, Any], samples: str) -> None:
    """Two quiet samples and one with a single loud value: each mode sees something else."""
    quiet = [normal(*SHAPE, seed=1, scale=0.1)]
    quiet.append(np.flip(quiet[0]).copy())
    loud = normal(*SHAPE, seed=3, scale=0.1)
    loud[0, 0, 0, 0] = 30
    everything = np.concatenate([*quiet, loud]).reshape(-1)
    calmest = np.sort(np.abs(everything))[: int(0.9 * everything.size)]
    expected = {
        "all": brute_force(everything, -128),
        "one": brute_force(quiet[0], -128),
        "cut": brute_force(calmest, -128),
        "whole": -2,  # 30 / 127 fits into 2**-2
    }
    model = build([node("Conv", ["x", "w"], ["y"], "n")], {"x": SHAPE}, ["y"], {"w": normal(2, 2, 1, 1)})
    data = [{"x": x} for x in (quiet[0], loud, quiet[1])]
    result = quantize(model, "xint8", data, calibration=calibration)
    assert np.log2(activations(result.model)["x"].scale) == expected[samples]
    assert expected["all"] > expected["one"]


def test_scales_as_16_bit_ratios() -> None:
    model = build(
        [node("Conv", ["x", "w", "b"], ["c"], "n"), node("Relu", ["c"], ["y"], "r")],
        {"x": SHAPE},
        ["y"],
        {"w": normal(3, 2, 3, 3, scale=0.3), "b": normal(3)},
    )
    plain = quantize(model, "a8w8").model
    ratio = quantize(model, "a8w8", activations={"scale": "int16"}, weights={"scale": "int16"}).model
    pairs = [(activations(ratio)[k], activations(plain)[k]) for k in ("x", "y")]
    pairs.append((weights(ratio)["w"], weights(plain)["w"]))
    for found, free in pairs:
        fraction = Fraction(float(found.scale))
        assert fraction.denominator <= 2**16  # a power of two, as for every float
        assert fraction.numerator <= 32767
        # The nearest multiple of 2**-16, as long as its numerator fits.
        assert abs(float(found.scale) - float(free.scale)) <= 2.0**-17
        assert found.scale != free.scale
    # The bias follows: its scale is the product of the other two.
    product = activations(ratio)["x"].scale * weights(ratio)["w"].scale
    np.testing.assert_allclose(weights(ratio)["b"].scale, product, rtol=1e-6)


@pytest.mark.parametrize("qtype", [QType.INT8, QType.UINT8, QType.INT16])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_largest_numbers_do_not_come_back_as_infinity(qtype: QType, symmetric: bool) -> None:
    """A mask of the lowest float: -128 * 2**121 would be minus infinity."""
    values = np.array([np.finfo(np.float32).min, 1.0], np.float32)
    scheme = Scheme(qtype, symmetric=symmetric, scale=ScaleKind.POWER_OF_TWO)
    for params in (
        power_of_two_least_squares(bins_of(values), scheme),
        non_overflow(float(values[0]), 1.0, scheme),
        weight_power_of_two(values, scheme, clip=True),
    ):
        codes = np.array([qtype.qmin, qtype.qmax])
        assert np.isfinite(dequantize(codes, params)).all()
