"""Sigmoid as the NPU has it, straight between two bends, and what makes it fit the curve."""

from __future__ import annotations

import numpy as np

from roundel.types import Doubles

# Far out a SiLU needs slope 1, and where x is small 1.5: x/2 + x²/4 against x/2 + slope * x²/6.
SLOPES = np.round(2.0 ** (np.arange(13) / 16), 3)  # 1 to 1.68
_GATE_SLOPES = 2.0 ** (np.arange(-8, 9) / 8)
_GATE_SHIFTS = np.linspace(-2, 2, 17)
_TINY = 1e-12


def hard_sigmoid(x: Doubles) -> Doubles:
    """The NPU's: slope 1/6 through 1/2."""
    return np.clip(x / 6 + 0.5, 0, 1)


def sigmoid(x: Doubles) -> Doubles:
    """What it stands for."""
    return np.asarray(0.5 + 0.5 * np.tanh(0.5 * x))


def swish_errors(points: Doubles) -> Doubles:
    """For each of `SLOPES` the error of x * hard_sigmoid(slope * x), relative to the power of a SiLU."""
    wanted = points * sigmoid(points)
    errors = [np.square(points * hard_sigmoid(slope * points) - wanted).sum() for slope in SLOPES]
    return np.asarray(errors) / max(float(np.square(wanted).sum()), _TINY)


def fit_gate(points: Doubles) -> tuple[Doubles, Doubles]:
    """Slope and shift with which hard_sigmoid(slope * x + shift) is nearest to sigmoid(x), for each channel.

    Args:
        points: (channels, values) of x.
    """
    wanted, channels = sigmoid(points), len(points)
    slopes, shifts, least = np.ones(channels), np.zeros(channels), np.full(channels, np.inf)
    for slope in _GATE_SLOPES:
        for shift in _GATE_SHIFTS:
            error = np.square(hard_sigmoid(slope * points + shift) - wanted).sum(1)
            better = error < least
            slopes[better], shifts[better], least[better] = slope, shift, error[better]
    return slopes, shifts
