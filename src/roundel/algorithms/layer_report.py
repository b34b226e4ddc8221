"""What the improving steps tell while they run, and what they say of each layer at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Progress(Protocol):
    """Hears which step runs and how far it is."""

    def step(self, name: str, total: int | None = None) -> None:
        """A step begins."""

    def advance(self, done: int) -> None:
        """Units of it are done."""


@dataclass(frozen=True, slots=True)
class LayerReport:
    """What the walk did to one layer; errors are held-out, relative to the layer's own signal, in dB."""

    layer: str
    op: str
    before_db: float
    after_db: float
    kept: bool
    seconds: float
