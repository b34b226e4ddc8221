"""Tasks that workers import, and a look at the workers themselves."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from roundel.errors import DataError
from roundel.types import Arrays


@dataclass(frozen=True, slots=True)
class Number:
    """A part."""

    number: int
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Squares:
    """Squares numbers; dies at one of them as often as there are files to take away, and refuses another."""

    folder: Path | None = None
    deadly: int = -1
    refused: int = -1

    parallel = 2

    def open(self, cores: int) -> Squares:
        """Itself."""
        return self

    def __call__(self, part: Number) -> Arrays:
        """The square."""
        if part.number == self.refused:
            raise DataError("This number is refused.", where=f"part {part.number}")
        if part.number == self.deadly and self.folder is not None:
            for token in sorted(self.folder.iterdir()):
                token.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        return {"square": np.array(part.number**2)}


def children(parent: int, word: str) -> list[int]:
    """Processes below one, by a word of their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:  # it has ended
                continue
            if int(stat.rpartition(")")[2].split()[1]) == parent and word in line:
                found.append(int(entry.name))
    return found


class Killer(threading.Thread):
    """Kills the first process that shows up, once work has begun.

    Args:
        find: the processes that may be killed.
    """

    def __init__(self, find: Callable[[], list[int]]) -> None:
        super().__init__(daemon=True)
        self._find, self._begun = find, threading.Event()
        self.killed: int | None = None

    def begin(self, done: float) -> None:
        """Progress: from here on."""
        self._begun.set()

    def run(self) -> None:
        """Wait, look, kill."""
        self._begun.wait(60)
        end = time.monotonic() + 20
        while self.killed is None and time.monotonic() < end:
            for process in self._find():
                os.kill(process, signal.SIGKILL)
                self.killed = process
                break
            time.sleep(0.002)
