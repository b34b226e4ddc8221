"""How far one output is from another, less being better: for choices between whole models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Distance = Callable[[NDArray[Any], NDArray[Any]], float]

_TINY = 1e-10


def l2(reference: NDArray[Any], value: NDArray[Any]) -> float:
    """Length of the difference."""
    return float(np.linalg.norm(_flat(value) - _flat(reference)))


def kl(reference: NDArray[Any], value: NDArray[Any]) -> float:
    """Divergence of the values as distributions: what is negative is lifted to zero, the sum made one."""
    p, q = _shares(_flat(reference)), _shares(_flat(value))
    return float(np.sum(p * np.log((p + _TINY) / (q + _TINY))))


def cosine(reference: NDArray[Any], value: NDArray[Any]) -> float:
    """One less the cosine of the angle between the two; zero where one of them vanishes."""
    a, b = _flat(reference), _flat(value)
    norm = float(np.linalg.norm(a) * np.linalg.norm(b))
    return 1.0 - float(a @ b) / norm if norm > _TINY else 0.0


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
