"""Progress for whoever listens: a live line on a terminal, plain lines in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import IO

from rich import progress
from rich.console import Console

_MEMORY_SECONDS = 300.0  # of the speed that the time left comes from: layers differ
_QUIET_SECONDS = 10.0  # between two lines of a log: a run of seconds writes none, one of minutes some


class ProgressListener:
    """A live line for the current step, with the time left where it can be known."""

    def __init__(self, console: Console) -> None:
        self._progress = progress.Progress(
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description:<22}"),
            progress.BarColumn(bar_width=15),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[said]}"),
            console=console,
            transient=True,
            speed_estimate_period=_MEMORY_SECONDS,
        )
        self._task: progress.TaskID | None = None

    def step(self, name: str, total: int | None = None) -> None:
        """Show the next step in place of the last."""
        # Not in the constructor: a run that fails before its first step must leave the terminal alone.
        self._progress.start()
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(name, total=total, said="")

    def advance(self, done: float) -> None:
        """Move the bar."""
        if self._task is not None:
            self._progress.update(self._task, completed=done)

    def say(self, text: str) -> None:
        """Show a few words behind the times."""
        if self._task is not None:
            self._progress.update(self._task, said=text)

    def note(self, text: str) -> None:
        """Print a line that stays, above the live one."""
        self._progress.console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Take the live line away."""
        self._progress.stop()


class LogListener:
    """Plain lines at intervals, for a log: the time, the step, how far it is.

    Args:
        stream: where to.
        interval: seconds between two lines; 0 writes every step.
        clock: tells the time in seconds.
    """

    def __init__(
        self,
        stream: IO[str],
        interval: float = _QUIET_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self._interval, self._clock = stream, interval, clock
        self._start = self._last = clock()
        self._step, self._said = "", ""
        self._total: int | None = None

    def step(self, name: str, total: int | None = None) -> None:
        """The next step."""
        self._step, self._total, self._said = name, total, ""
        self._tell(None)

    def advance(self, done: float) -> None:
        """How far it is."""
        self._tell(done)

    def say(self, text: str) -> None:
        """A few words for the next line."""
        self._said = text

    def note(self, text: str) -> None:
        """A line of its own, at once."""
        self._write(text)

    def close(self) -> None:
        """Nothing is left to take away."""

    def _tell(self, done: float | None) -> None:
        now = self._clock()
        if now - self._last < self._interval:
            return
        self._last = now
        part = "" if done is None else f" {done:g}" + ("" if self._total is None else f"/{self._total:g}")
        self._write(f"{self._step}{part}{'  ' + self._said if self._said else ''}")

    def _write(self, text: str) -> None:
        minutes, seconds = divmod(int(self._clock() - self._start), 60)
        self._stream.write(f"[{minutes:02d}:{seconds:02d}] {text}\n")
        self._stream.flush()


def listener_of(console: Console) -> ProgressListener | LogListener:
    """A live line on a terminal, lines in a file."""
    return ProgressListener(console) if console.is_terminal else LogListener(console.file)


class Listeners:
    """Several listeners as one."""

    def __init__(self, all_of_them: Sequence[ProgressListener | LogListener]) -> None:
        self._all = all_of_them

    def step(self, name: str, total: int | None = None) -> None:
        """To all."""
        for one in self._all:
            one.step(name, total)

    def advance(self, done: float) -> None:
        """To all."""
        for one in self._all:
            one.advance(done)

    def say(self, text: str) -> None:
        """To all."""
        for one in self._all:
            one.say(text)

    def note(self, text: str) -> None:
        """To all."""
        for one in self._all:
            one.note(text)

    def close(self) -> None:
        """To all."""
        for one in self._all:
            one.close()
