"""Whether there are enough samples: how the ranges grow with their number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb

import numpy as np
from numpy.typing import NDArray

from roundel.data.lint import Finding

_FEW, _MANY = 16, 64
_STILL_GROWING = 0.12
_ENOUGH = 0.98
_STEPS = tuple(2**k for k in range(3, 20))

Extremes = Mapping[str, tuple[Sequence[float], Sequence[float]]]


def coverage(extremes: Extremes, count: int) -> float:
    """How much of the ranges a random choice of so many samples reaches, on average over tensors.

    The average over all choices has a closed form, so that the order of the samples does not matter.

    Args:
        extremes: for each tensor the smallest and the largest value of each sample.
        count: samples to choose.
    """
    shares = []
    for lows, highs in extremes.values():
        sizes = np.sort(np.maximum(np.abs(lows), np.abs(highs)))[::-1]
        if len(sizes) >= count and sizes[0] > 0:
            shares.append(float(sizes @ _weights(len(sizes), count)) / sizes[0])
    return float(np.mean(shares)) if shares else 1.0


def range_findings(extremes: Extremes) -> list[Finding]:
    """Too few samples, or more than needed."""
    total = max((len(lows) for lows, _ in extremes.values()), default=0)
    if total == 0:
        return []
    growth = 1 - coverage(extremes, total // 2) if total > 1 else None
    if growth is not None and (total < _FEW or growth > _STILL_GROWING):
        return [
            Finding(
                "few-samples",
                "warning" if growth > _STILL_GROWING or total < _FEW // 2 else "note",
                f"{total} samples: half of them reach {1 - growth:.0%} of the ranges on average, so that more"
                " are likely to widen them.",
                "Use 64 or more.",
            )
        ]
    if total == 1:
        return [Finding("few-samples", "warning", "There is one sample only.", "Use 64 or more.")]
    enough = next((n for n in _STEPS if n <= total // 2 and coverage(extremes, n) >= _ENOUGH), None)
    if enough is None or total < _MANY:
        return []
    return [
        Finding(
            "more-than-needed",
            "note",
            f"{enough} of the {total} samples would have done: they reach {coverage(extremes, enough):.0%}"
            " of the ranges.",
            "",
        )
    ]


def _weights(total: int, count: int) -> NDArray[np.float64]:
    """The chance that the k-th largest is the largest of `count` out of `total`."""
    whole = comb(total, count)
    chances = [comb(total - k - 1, count - 1) / whole if total - k >= count else 0.0 for k in range(total)]
    return np.array(chances)
