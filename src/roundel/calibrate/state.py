"""What calibration knows and the writer writes: the plan with its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundel.plan.types import QuantPlan
from roundel.types import QParams


@dataclass(frozen=True, slots=True)
class QuantState:
    """A plan whose scales are known.

    Args:
        plan: what every tensor becomes.
        params: scale and zero point of every tensor that the plan stores in integers.
        float_scales: scale of every tensor that it stores as a scaled float.
        values: float content that replaces a constant's own (bias correction, equalization).
        codes: integer content of a constant where an algorithm chose the rounding itself.
        notes: adjustments worth telling.
    """

    plan: QuantPlan
    params: Mapping[str, QParams]
    float_scales: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    values: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    codes: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
