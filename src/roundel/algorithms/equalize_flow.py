"""What equalization knows of one tensor: its channels and their bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from roundel.algorithms.equalize_channels import Ids
from roundel.types import Doubles

_FAR = 1e60


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """What is known of one tensor.

    Attributes:
        axis: where its channels are.
        ids: its channels; None where it cannot be rescaled, and then low and high hold one number.
        low: each value of a channel is at least this.
        high: and at most this.
    """

    axis: int
    ids: Ids | None
    low: Doubles
    high: Doubles

    def within(self, low: Doubles | float, high: Doubles | float) -> Flow:
        """The same channels with other bounds."""
        shape = self.low.shape
        return replace(
            self,
            low=np.array(np.broadcast_to(low, shape), np.float64),
            high=np.array(np.broadcast_to(high, shape), np.float64),
        )

    def sane(self) -> Flow:
        """Bounds too far out to compute with count as none."""
        low = np.where(np.abs(self.low) <= _FAR, self.low, -np.inf)
        return replace(self, low=low, high=np.where(np.abs(self.high) <= _FAR, self.high, np.inf))

    def hull(self) -> Flow:
        """The bounds alone, of all channels together."""
        return Flow(0, None, self.low.min(keepdims=True), self.high.max(keepdims=True))


def bounded(low: float, high: float) -> Flow:
    """A tensor of which only this much is known."""
    return Flow(0, None, np.array([low]), np.array([high]))


UNKNOWN = bounded(-np.inf, np.inf)
