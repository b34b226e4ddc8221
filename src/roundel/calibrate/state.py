"""What calibration knows and the writer writes: the plan with its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from roundel.plan.types import QuantPlan
from roundel.types import QParams


@dataclass(frozen=True, slots=True)
class QuantState:
    """A plan whose scales are known.

    Args:
        plan: what every tensor becomes.
        params: scale and zero point of every tensor in the plan.
        values: float content that replaces a constant's own (bias correction, equalization).
        codes: integer content of a constant where an algorithm chose the rounding itself.
        notes: adjustments worth telling.
    """

    plan: QuantPlan
    params: Mapping[str, QParams]
    values: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    codes: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
