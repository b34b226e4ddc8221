"""Time as a budget: what a rung will take, and an end to one that takes longer than there is."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from roundel.ladder.rungs import Rung
from roundel.report.listener import Listener

_START = 1.0  # seconds for sessions and files, whatever the model


class OutOfTime(Exception):  # noqa: N818 - no error: the walk catches it
    """A rung was still at work when time was over."""


class Watch:
    """Passes everything on to a listener, with the rung's name, and ends the rung when time is over.

    Args:
        listener: who is told.
        title: put before each step's name.
        deadline: on the clock of `time.perf_counter`; None for no end.
    """

    def __init__(self, listener: Listener, title: str, deadline: float | None) -> None:
        self._listener, self._title, self._deadline = listener, title, deadline

    def step(self, name: str, total: int | None = None) -> None:
        """A step begins."""
        self._look()
        self._listener.step(f"{self._title}: {name}", total)

    def advance(self, done: float) -> None:
        """Some of it is done."""
        self._look()
        self._listener.advance(done)

    def say(self, text: str) -> None:
        """A few words."""
        self._look()
        self._listener.say(text)

    def close(self) -> None:
        """The live line goes away."""
        self._listener.close()

    def _look(self) -> None:
        if self._deadline is not None and time.perf_counter() > self._deadline:
            raise OutOfTime


@dataclass(slots=True)
class Forecast:
    """What a rung will take, from one float pass over the data and from the rungs before.

    Attributes:
        forward: seconds of the float model over the calibration data.
        judging: seconds of the float model over the held-out data.
    """

    forward: float
    judging: float
    _seen: list[tuple[float, float]] = field(default_factory=list)

    def seconds(self, rung: Rung) -> float:
        """Of making and judging it."""
        expected = self._expected(rung)
        if not self._seen:
            return expected
        # The nearest rung in work says most: what a thread or a core is worth differs from step to step.
        nearest = min(self._seen, key=lambda pair: abs(pair[0] - rung.work))
        return expected * nearest[1]

    def learn(self, rung: Rung, seconds: float) -> None:
        """A rung has taken so long."""
        self._seen.append((rung.work, seconds / self._expected(rung)))

    def _expected(self, rung: Rung) -> float:
        return _START + rung.work * self.forward + 2 * self.judging
