"""How close two arrays are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Closeness:
    """Sums over pairs of arrays, mergeable, from which SQNR and cosine follow."""

    signal: float = 0.0
    noise: float = 0.0
    cross: float = 0.0
    other: float = 0.0
    worst: float = 0.0
    count: int = 0

    @staticmethod
    def of(reference: NDArray[Any], value: NDArray[Any]) -> Closeness:
        """The sums for one pair; a value that is no number is infinitely far from one that is."""
        a = np.asarray(reference, np.float64).ravel()
        b = np.asarray(value, np.float64).ravel()
        with np.errstate(invalid="ignore", over="ignore"):
            d = b - a
            worst = float(np.abs(d).max()) if d.size else 0.0
            signal, noise = _product(a, a), _product(d, d)
            if math.isnan(noise) and not math.isnan(signal):
                noise = worst = math.inf
            return Closeness(signal, noise, _product(a, b), _product(b, b), worst, a.size)

    @staticmethod
    def table(many: Iterable[Closeness]) -> NDArray[np.float64]:
        """A row of plain numbers for each, which `rows` reads back; counts stay exact below 2**53."""
        return np.array([astuple(one) for one in many], np.float64)

    @staticmethod
    def rows(table: NDArray[np.float64]) -> list[Closeness]:
        """The inverse of `table`."""
        return [replace(Closeness(*row[:-1]), count=int(row[-1])) for row in table.tolist()]

    def merge(self, more: Closeness) -> Closeness:
        """The sums over both."""
        return Closeness(
            self.signal + more.signal,
            self.noise + more.noise,
            self.cross + more.cross,
            self.other + more.other,
            max(self.worst, more.worst),
            self.count + more.count,
        )

    @property
    def sqnr_db(self) -> float:
        """Signal over noise in dB; infinite when equal, minus infinite for noise on silence."""
        return decibels(self.signal, self.noise)

    @property
    def cosine(self) -> float:
        """Cosine of the angle between the two; 1 when both are zero."""
        norm = math.sqrt(self.signal) * math.sqrt(self.other)
        if norm == 0:
            return 1.0 if self.signal == self.other else 0.0
        return self.cross / norm


def comparable(reference: Any, value: Any) -> bool:
    """Whether two results are float arrays of one shape, not empty, and the first is finite."""
    return (
        isinstance(reference, np.ndarray)
        and isinstance(value, np.ndarray)
        and reference.dtype.kind == value.dtype.kind == "f"
        and reference.shape == value.shape
        and bool(np.isfinite(reference).all())
        and reference.size > 0
    )


def decibels(signal: float, noise: float) -> float:
    """Power over power in dB; infinite without noise, minus infinite for noise on silence or without end."""
    if noise == 0:
        return math.inf
    if not signal > 0 or math.isinf(noise):
        return -math.inf
    return 10 * (math.log10(signal) - math.log10(noise))


def _product(one: NDArray[Any], other: NDArray[Any]) -> float:
    """The sum of products, in an order that does not depend on the number of threads, as it does in BLAS."""
    return float(np.einsum("i,i->", one, other))


def layer_db(power: float, error: float) -> float:
    """The same for a report of one layer, which stays finite where nothing is left of either."""
    return decibels(max(power, 1e-30), max(error, 1e-30))


Distance = Callable[[NDArray[Any], NDArray[Any]], float]

_TINY = 1e-10


def l2(reference: NDArray[Any], value: NDArray[Any]) -> float:
    """Length of the difference."""
    difference = _flat(value) - _flat(reference)
    return math.sqrt(_product(difference, difference))


def kl(reference: NDArray[Any], value: NDArray[Any]) -> float:
    """Divergence of the values as distributions: what is negative is lifted to zero, the sum made one."""
    p, q = _shares(_flat(reference)), _shares(_flat(value))
    return float(np.sum(p * np.log((p + _TINY) / (q + _TINY))))


def cosine(reference: NDArray[Any], value: NDArray[Any]) -> float:
    """One less the cosine of the angle between the two; zero where one of them vanishes."""
    a, b = _flat(reference), _flat(value)
    norm = math.sqrt(_product(a, a)) * math.sqrt(_product(b, b))
    return 1.0 - _product(a, b) / norm if norm > _TINY else 0.0


def sqnr(reference: NDArray[Any], value: NDArray[Any]) -> float:
    """Noise over signal in dB: the signal-to-noise ratio with the other sign."""
    a = _flat(reference)
    signal, noise = float(np.mean(a**2)), float(np.mean((_flat(value) - a) ** 2))
    return 10 * math.log10(max(noise, _TINY) / max(signal, _TINY))


def psnr(reference: NDArray[Any], value: NDArray[Any]) -> float:
    """Noise over the peak in dB: the peak signal-to-noise ratio with the other sign."""
    a = _flat(reference)
    peak, noise = float(np.abs(a).max()), float(np.mean((_flat(value) - a) ** 2))
    return 10 * math.log10(max(noise, _TINY)) - 20 * math.log10(max(peak, _TINY))


DISTANCES: Mapping[str, Distance] = {"l2": l2, "kl": kl, "cosine": cosine, "sqnr": sqnr, "psnr": psnr}
IN_DECIBELS = frozenset({"sqnr", "psnr"})  # whose limits people give as the ratio, the larger the better


def _flat(array: NDArray[Any]) -> NDArray[np.float64]:
    return np.asarray(array, np.float64).ravel()


def _shares(values: NDArray[np.float64]) -> NDArray[np.float64]:
    lifted = values - min(float(values.min()), 0.0)
    total = float(lifted.sum())
    return lifted / total if total > 0 else np.full_like(values, 1 / len(values))
