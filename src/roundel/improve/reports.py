"""What the improving steps tell while they run, and what they say of each layer at the end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerReport:
    """What the walk did to one layer; errors are held-out, relative to the layer's own signal, in dB."""

    layer: str
    op: str
    before_db: float
    after_db: float
    kept: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class Moment:
    """How far it is.

    Attributes:
        done: layers, with the finished share of the one that learns now.
        total: layers in all.
        loss: error of the rounded layer that learns or has learned, relative to its signal; None at first.
    """

    done: float
    total: int
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class FinetuneReport:
    """What became of one layer.

    Attributes:
        layer: the node; of a block the nodes, joined by '+'.
        op: its operator.
        before_db, after_db: the layer's own signal over its held-out error, in dB; equal where not kept.
        iterations: steps taken.
        seconds: what it cost.
        kept: whether the error fell, so that the new constants stay.
    """

    layer: str
    op: str
    before_db: float
    after_db: float
    iterations: int
    seconds: float
    kept: bool


FEWEST = 4  # samples: with fewer, nothing is left to judge by
_SHARE = 0.2


def held_out_count(count: int) -> int:
    """How many of the last samples judge the steps that learn from the others."""
    return max(1, round(count * _SHARE))
