"""Tensors that hold whole multiples of a power of two: what makes float32 as exact as integers.

Between a DQ and the next Q, all scales are powers of two. A sum of products of codes is then a whole number
of steps; as long as no partial sum has more than 24 bits, float32 computes it without rounding, in any order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roundel.qdq.read import Quantizer
from roundel.types import Array, Doubles

FLOAT_BITS = 24
FINEST = 16  # bits behind the point of a value in output codes, which leave room for 7 before it and a sign


@dataclass(frozen=True, slots=True)
class Lattice:
    """Values n x unit with low <= n <= high.

    Attributes:
        unit: a power of two.
        low: the least n, at most 0.
        high: the largest n, at least 0.
    """

    unit: float
    low: float
    high: float

    @property
    def bound(self) -> float:
        """The largest |n|."""
        return max(-self.low, self.high)

    @property
    def whole(self) -> bool:
        """Whether float32 holds every value."""
        return bool(self.bound < 2**FLOAT_BITS)

    def at(self, unit: float) -> Lattice:
        """The same values in a finer unit."""
        times = self.unit / unit
        return Lattice(unit, self.low * times, self.high * times)

    def plus(self, other: Lattice) -> Lattice:
        """Of a sum."""
        unit = min(self.unit, other.unit)
        left, right = self.at(unit), other.at(unit)
        return Lattice(unit, left.low + right.low, left.high + right.high)

    def negative(self) -> Lattice:
        """Of the values with the other sign."""
        return Lattice(self.unit, -self.high, -self.low)

    def times(self, other: Lattice) -> Lattice:
        """Of a product."""
        ends = [a * b for a in (self.low, self.high) for b in (other.low, other.high)]
        return Lattice(self.unit * other.unit, min(ends), max(ends))

    def union(self, other: Lattice) -> Lattice:
        """Of values from either."""
        unit = min(self.unit, other.unit)
        left, right = self.at(unit), other.at(unit)
        return Lattice(unit, min(left.low, right.low), max(left.high, right.high))

    def within(self, low: float | None, high: float | None) -> Lattice | None:
        """Of values cut at bounds; None where a bound is no multiple of the unit."""
        least = self.low if low is None else max(self.low, low / self.unit)
        most = self.high if high is None else min(self.high, high / self.unit)
        if not (float(least).is_integer() and float(most).is_integer()):
            return None
        return Lattice(self.unit, min(least, 0.0), max(most, 0.0))

    def cut(self) -> Lattice:
        """What float32 holds of it: larger values are saturated by the next Q."""
        most = float(2**FLOAT_BITS - 1)
        return Lattice(self.unit, max(self.low, -most), min(self.high, most))


def of_codes(stored: Quantizer) -> Lattice | None:
    """Of what a DQ makes of any codes; None where its scale is no single power of two."""
    params = stored.params
    if params is None or stored.scale.size != 1 or not stored.power_of_two:
        return None
    zero = float(stored.zero_point.reshape(-1)[0])
    return Lattice(float(stored.scale.reshape(-1)[0]), params.qtype.qmin - zero, params.qtype.qmax - zero)


def through(stored: Quantizer, source: Lattice | None) -> Lattice | None:
    """Of what a pair of Q and DQ makes of values: what never is negative stays so."""
    codes = of_codes(stored)
    if codes is None or source is None:
        return codes
    ratio = source.unit / codes.unit
    low, high = np.floor(source.low * ratio), np.ceil(source.high * ratio)
    return Lattice(codes.unit, max(codes.low, min(low, 0.0)), min(codes.high, max(high, 0.0)))


def of_constant(codes: Array, stored: Quantizer) -> Lattice | None:
    """Of a stored constant, with the ends that it really has."""
    lattice = of_codes(stored)
    if lattice is None or not codes.size:
        return lattice
    steps = codes.astype(np.float64) - float(stored.zero_point.reshape(-1)[0])
    return Lattice(lattice.unit, min(float(steps.min()), 0.0), max(float(steps.max()), 0.0))


def of_layer(data: Lattice, weight: Lattice, rows: Doubles, bias: Doubles) -> Lattice:
    """Sums of products, in whatever order and however many of the products are left out (padding).

    Args:
        data: what the layer reads.
        weight: of its weights.
        rows: the weights in steps, one row for each output.
        bias: as numbers, one for each output.
    """
    product = data.unit * weight.unit
    unit = min(product, finest(bias))
    upper = np.maximum(rows * data.low, rows * data.high).clip(0).sum(axis=1)
    lower = np.minimum(rows * data.low, rows * data.high).clip(None, 0).sum(axis=1)
    steps, times = bias / unit, product / unit
    low, high = (
        float((lower * times + steps.clip(None, 0)).min()),
        float((upper * times + steps.clip(0)).max()),
    )
    return Lattice(unit, low, high)


def finest(values: Doubles) -> float:
    """The largest power of two that all values are multiples of; infinity for zeros."""
    live = np.abs(values[values != 0])
    if not live.size:
        return np.inf
    mantissa, exponent = np.frexp(live)
    whole = (mantissa * 2.0**53).astype(np.int64)
    trailing = np.log2((whole & -whole).astype(np.float64))
    return float(2.0 ** (exponent - 53 + trailing).min())
