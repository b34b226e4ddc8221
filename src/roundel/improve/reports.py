"""What the improving steps say of each layer at the end, and how many samples judge them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerReport:
    """What became of one layer.

    Attributes:
        layer: the node, or the tensor where a step works on those.
        op: its operator.
        before_db, after_db: the layer's own signal over its held-out error, in dB; equal where not kept.
        kept: whether the error fell, so that the new constants stay.
        seconds: what it cost.
        iterations: steps that fine-tuning took; None elsewhere.
    """

    layer: str
    op: str
    before_db: float
    after_db: float
    kept: bool
    seconds: float
    iterations: int | None = None


FEWEST = 4  # samples: with fewer, nothing is left to judge by
_SHARE = 0.2


def held_out_count(count: int) -> int:
    """How many of the last samples judge the steps that learn from the others."""
    return max(1, round(count * _SHARE))


def held_from(count: int) -> int:
    """The number of the first of them."""
    return count - held_out_count(count)
