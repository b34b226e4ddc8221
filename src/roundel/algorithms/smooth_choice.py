"""Which factors suit a group of layers: by the error of their outputs on rows that were held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundel.algorithms.linear_layers import Linear
from roundel.algorithms.smooth_groups import Group, Seen
from roundel.numerics.affine import fake_quantize, params_from_range, weight_params
from roundel.plan.types import QuantPlan
from roundel.recipe import Recipe
from roundel.types import Doubles, PerChannel, QType, Scheme

CANDIDATES = (0.0, 0.15, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_SMALLEST = 1e-5  # of the largest: a channel that is silent in the data, or that no layer reads, has a factor
_AT_RUN_TIME = Scheme(QType.UINT8, symmetric=False)


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The best factors and what they do.

    Attributes:
        alpha: the share of the difficulty that moves to the weights; None where the layers stay as they are.
        factors: what each input is divided by, and each row of the weights multiplied.
        before: error of each layer's output without factors, relative to its size.
        after: with them.
    """

    alpha: float | None
    factors: Doubles
    before: tuple[float, ...]
    after: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """How a group is quantized.

    Attributes:
        data: of the tensor; None where it stays float.
        weights: of each layer, for a weight written as (inputs, outputs); None where it stays float.
    """

    data: Scheme | None
    weights: tuple[Scheme | None, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Maker:
    """A quantized layer that takes the factors into the columns of its weight.

    Attributes:
        weight: (inputs, outputs).
        channels: of each output; -1 where it is none of the group's.
        scheme: of the weight.
        rows: held-out inputs of the layer.
    """

    weight: NDArray[Any]
    channels: NDArray[np.int64]
    scheme: Scheme
    rows: NDArray[np.float32]

    def error(self, factors: Doubles) -> float:
        """What rounding its weight does to its output, relative to the output's size."""
        divisors = np.append(factors, 1.0)[self.channels]
        scaled = (self.weight / divisors).astype(np.float32)
        rounded = fake_quantize(scaled, weight_params(scaled, self.scheme), narrow=self.scheme.symmetric)
        return _square(self.rows @ (rounded * divisors - self.weight)) / _size(self.rows @ self.weight)


def storage(group: Group, plan: QuantPlan, recipe: Recipe) -> Storage:
    """What the plan says of the group."""
    if recipe.mode == "dynamic":
        whole = recipe.weights.scheme
        assert isinstance(whole, Scheme), "the recipe allows no other in this mode"
        chosen = [plan.nodes[layer.name].quantized for layer in group.layers]
        return Storage(_AT_RUN_TIME, tuple(whole if one else None for one in chosen))
    return Storage(_integers(plan, group.name), tuple(weight_scheme(layer, plan) for layer in group.layers))


def weight_scheme(layer: Linear, plan: QuantPlan) -> Scheme | None:
    """How a layer's weight, seen as (inputs, outputs), is stored; None where it stays float."""
    scheme = _integers(plan, layer.weight_name)
    if scheme is None or not layer.transposed or not isinstance(scheme.granularity, PerChannel):
        return scheme
    return replace(scheme, granularity=PerChannel(1 - scheme.granularity.axis % 2))


def smoothing_factors(magnitudes: Doubles, weights: Sequence[NDArray[Any]], alpha: float) -> Doubles:
    """max|X|^alpha / max|W|^(1 - alpha) for each channel, W being all layers together."""
    rows = np.max([np.abs(weight).max(axis=1) for weight in weights], axis=0).astype(np.float64)
    return np.asarray(_above_zero(magnitudes) ** alpha / _above_zero(rows) ** (1 - alpha))


def choose(group: Group, seen: Seen, stored: Storage, maker: Maker | None, alphas: Sequence[float]) -> Choice:
    """The candidate with the smallest error, layers counting alike; none where it does not fall.

    Args:
        group: the layers.
        seen: ranges, and rows that the ranges have not seen.
        stored: how tensor and weights will be quantized.
        maker: the layer that would take the factors; what rounding does to it counts, too.
        alphas: candidates.
    """
    weights = [layer.weight for layer in group.layers]
    targets = [seen.rows @ weight for weight in weights]
    sizes = [_size(target) for target in targets]

    def errors(factors: Doubles) -> tuple[float, ...]:
        data = np.asarray(seen.rows / factors, np.float32)
        if stored.data is not None:
            low, high = (seen.low / factors).min(), (seen.high / factors).max()
            data = fake_quantize(data, params_from_range(low, high, stored.data))
        found = []
        for weight, scheme, target, size in zip(weights, stored.weights, targets, sizes, strict=True):
            scaled = (weight * factors[:, None]).astype(np.float32)
            if scheme is not None:
                scaled = fake_quantize(scaled, weight_params(scaled, scheme), narrow=scheme.symmetric)
            found.append(_square(data @ scaled - target) / size)
        return tuple(found)

    def cost(factors: Doubles, found: tuple[float, ...]) -> float:
        return sum(found) + (0.0 if maker is None else maker.error(factors))

    plain = np.ones(group.channels)
    before = errors(plain)
    best, least = Choice(None, plain, before, before), cost(plain, before)
    for alpha in alphas:
        factors = smoothing_factors(seen.magnitudes, weights, alpha)
        found = errors(factors)
        if (total := cost(factors, found)) < least:
            best, least = Choice(alpha, factors, before, found), total
    return best


def _size(array: NDArray[Any]) -> float:
    return _square(array) or 1.0


def _square(array: NDArray[Any]) -> float:
    return float(np.vdot(array, array))


def _integers(plan: QuantPlan, name: str) -> Scheme | None:
    tensor = plan.tensors.get(name)
    return tensor.scheme if tensor is not None and isinstance(tensor.scheme, Scheme) else None


def _above_zero(values: Doubles) -> Doubles:
    largest = float(values.max(initial=0.0)) or 1.0
    return np.maximum(values, largest * _SMALLEST)
