"""The calibration methods, and the step from a statistic (or a constant) to scale and zero point."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from roundel.calibrate.observers import ExponentObserver, HistogramObserver, Observer, StatKind
from roundel.errors import RecipeError
from roundel.numerics import scales
from roundel.numerics.affine import params_from_range, weight_params
from roundel.numerics.histogram import Bins, Scenario, bins_of, distribution, entropy, percentile
from roundel.types import Array, PerChannel, PerTensor, QParams, Range, ScaleKind, Scheme


@dataclass(frozen=True, slots=True)
class MinMax:
    """The observed extremes.

    Args:
        moving_average: None for the extremes over all samples; "mean" for the mean over samples of each
            sample's extremes; a number in (0, 1] for an exponential moving average in sample order.
    """

    needs: ClassVar[StatKind] = StatKind.MINMAX
    moving_average: float | Literal["mean"] | None = None


@dataclass(frozen=True, slots=True)
class Percentile:
    """Keep a percentage of the values: of |x| when symmetric, else cutting both sides alike."""

    needs: ClassVar[StatKind] = StatKind.HISTOGRAM
    percent: float = 99.999
    symmetric: bool = True


@dataclass(frozen=True, slots=True)
class Entropy:
    """The range with the least Kullback-Leibler divergence: of |x| when symmetric, else cut on each side."""

    needs: ClassVar[StatKind] = StatKind.HISTOGRAM
    symmetric: bool = True


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and standard deviation; see `roundel.numerics.histogram.distribution`."""

    needs: ClassVar[StatKind] = StatKind.HISTOGRAM
    scenario: Literal["same", "p3"] = "same"


@dataclass(frozen=True, slots=True)
class LayerWisePercentile:
    """For each tensor the percentile with the least quantization error."""

    needs: ClassVar[StatKind] = StatKind.HISTOGRAM
    candidates: tuple[float, ...] = (99.99, 99.999, 99.99999)
    metric: Literal["mae", "mse"] = "mae"
    symmetric: bool = True


@dataclass(frozen=True, slots=True)
class Mse:
    """The scale with the least squared error; over exponents where the scale is a power of two."""

    needs: ClassVar[StatKind] = StatKind.HISTOGRAM


@dataclass(frozen=True, slots=True)
class PowerOfTwoMse:
    """The power-of-two scale with the least squared error.

    Args:
        percent: leave out the values beyond this percentile of |x|; None takes all.
    """

    needs: ClassVar[StatKind] = StatKind.HISTOGRAM
    percent: float | None = None


@dataclass(frozen=True, slots=True)
class MostCommonPowerOfTwo:
    """The power-of-two scale that most samples would choose by themselves; 8-bit symmetric types."""

    needs: ClassVar[StatKind] = StatKind.EXPONENTS


@dataclass(frozen=True, slots=True)
class NonOverflow:
    """The smallest power-of-two scale at which nothing saturates."""

    needs: ClassVar[StatKind] = StatKind.MINMAX


RangeMethod = MinMax | Percentile | Entropy | Distribution | LayerWisePercentile | Mse
Method = RangeMethod | PowerOfTwoMse | MostCommonPowerOfTwo | NonOverflow


def choose(
    method: Method, stat: Observer, scheme: Scheme, reader: scales.ReaderFunction | None = None
) -> QParams:
    """Scale and zero point of an activation.

    Args:
        method: how the range is chosen.
        stat: what was observed; its kind must be what the method needs.
        scheme: how the tensor is stored; per tensor.
        reader: a function that alone reads the tensor: a least squared error is that of its results.

    Raises:
        RecipeError: the method needs power-of-two scales and the scheme has others.
    """
    method = _settled(method, scheme)
    match method:
        case NonOverflow():
            return scales.non_overflow(stat.low, stat.high, scheme)
        case MostCommonPowerOfTwo():
            return _most_common(stat, scheme)
        case PowerOfTwoMse(percent):
            bins = _bins(stat)
            if percent is not None:
                cut = percentile(bins, percent, symmetric=True)
                bins = bins.within(cut.low, cut.high)
            return scales.power_of_two_least_squares(bins, scheme, reader=reader)
        case MinMax():
            found = _extremes(method, stat)
        case _:
            found = _search(method, _bins(stat), scheme, reader)
    return params_from_range(found.low, found.high, scheme)


def choose_range(method: Method, stat: Observer) -> Range:
    """The range of an activation whose type has no codes to search over.

    Raises:
        RecipeError: the method minimises an error of integer codes.
    """
    if isinstance(method, MinMax):
        return _extremes(method, stat)
    if isinstance(method, Percentile | Entropy | Distribution):
        return _range(method, _bins(stat))
    raise RecipeError(
        f"{type(method).__name__} searches integer codes, and this tensor is stored as a float.",
        expected="minmax, percentile, entropy or distribution",
    )


def choose_weight(method: Method, array: Array, scheme: Scheme) -> QParams:
    """Scale and zero point of a constant, per tensor or per channel as the scheme says.

    A moving average has no meaning for a constant: MinMax takes its extremes.

    Raises:
        RecipeError: the method needs power-of-two scales and the scheme has others.
    """
    method = _settled(method, scheme)
    match method:
        case MinMax():
            return weight_params(array, scheme)
        case NonOverflow() | PowerOfTwoMse() | MostCommonPowerOfTwo():
            return scales.weight_power_of_two(array, scheme, clip=not isinstance(method, NonOverflow))
        case Mse():
            return scales.weight_least_squares(array, scheme)
    if not isinstance(scheme.granularity, PerChannel):
        found = _search(method, bins_of(array), scheme)
        return params_from_range(found.low, found.high, scheme)
    one = replace(scheme, granularity=PerTensor())
    ranges = [_search(method, bins_of(row), one) for row in np.moveaxis(array, scheme.granularity.axis, 0)]
    return params_from_range([r.low for r in ranges], [r.high for r in ranges], scheme)


def _extremes(method: MinMax, stat: Observer) -> Range:
    match method.moving_average:
        case None:
            return Range(stat.low, stat.high)
        case "mean":
            return Range(*stat.mean())
        case constant:
            return Range(*stat.moving_average(constant))


def _search(
    method: Percentile | Entropy | Distribution | LayerWisePercentile | Mse,
    bins: Bins,
    scheme: Scheme,
    reader: scales.ReaderFunction | None = None,
) -> Range:
    match method:
        case LayerWisePercentile(candidates, metric, symmetric):
            tried = [percentile(bins, percent, symmetric=symmetric) for percent in candidates]
            return scales.best_range(bins, tried, scheme, scales.ErrorMetric(metric))
        case Mse():
            return scales.least_squares_range(bins, scheme, reader)
        case _:
            return _range(method, bins)


def _range(method: Percentile | Entropy | Distribution, bins: Bins) -> Range:
    match method:
        case Percentile(percent, symmetric):
            return percentile(bins, percent, symmetric=symmetric)
        case Entropy(symmetric):
            # Of an 8-bit type for finer ones, too: with as many codes as bins nothing could be compared.
            return entropy(bins, levels=128 if symmetric else 256, symmetric=symmetric)
        case Distribution(scenario):
            return distribution(bins, Scenario(scenario))


def _most_common(stat: Observer, scheme: Scheme) -> QParams:
    if not isinstance(stat, ExponentObserver) or not scheme.symmetric or scheme.qtype.bits != 8:
        raise TypeError("the most common scale is collected for symmetric 8-bit types only")
    return scales.power_of_two_params(stat.most_common(), scheme)


def _bins(stat: Observer) -> Bins:
    if not isinstance(stat, HistogramObserver):
        raise TypeError("this method needs a histogram, and only extremes were collected")
    return stat.bins()


def _settled(method: Method, scheme: Scheme) -> Method:
    """The method that chooses this scheme's scales: a least error over exponents is one of its own."""
    power_of_two = scheme.scale is ScaleKind.POWER_OF_TWO
    if isinstance(method, Mse) and power_of_two:
        return PowerOfTwoMse()
    if isinstance(method, NonOverflow | PowerOfTwoMse | MostCommonPowerOfTwo) and not power_of_two:
        raise RecipeError(
            f"{type(method).__name__} chooses powers of two, and this scheme has other scales.",
            observed=scheme,
            expected="a power-of-two scale",
        )
    return method
