"""What a run tells while it goes on."""

from __future__ import annotations

from typing import Protocol


class Listener(Protocol):
    """Receives the run's steps; every method may be called from the run's own thread only."""

    def step(self, name: str, total: int | None = None) -> None:
        """A step begins; `total` is its number of units when it is known."""

    def advance(self, done: float) -> None:
        """`done` units of the current step are finished; a share of a unit counts."""

    def say(self, text: str) -> None:
        """A few words about what goes on now."""

    def close(self) -> None:
        """The run has ended, well or not."""


class Silent:
    """A listener that says nothing."""

    def step(self, name: str, total: int | None = None) -> None:
        """Nothing."""

    def advance(self, done: float) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
