"""Threads of this process: one copy of the model, nothing to send."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Self

from roundel.executors.protocol import Opened, PartT, Task
from roundel.types import Arrays


def usable_cores() -> int:
    """What this process may use, which in a container is less than what the machine has."""
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable is not None else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class LocalExecutor:
    """Works in this process.

    Attributes:
        workers: threads; None for every core.
    """

    workers: int | None = None

    @property
    def name(self) -> str:
        """In words, for people."""
        return "this process"

    @property
    def sees_files(self) -> bool:
        """Whether workers can read the files that this process can."""
        return True

    def start(self, task: Task[PartT]) -> LocalSession[PartT]:
        """Threads for a task."""
        return LocalSession(task.open(self.workers or usable_cores()))


class LocalSession(Generic[PartT]):
    """Threads that share an opened task."""

    def __init__(self, opened: Opened[PartT]) -> None:
        self._opened = opened
        self._pool = ThreadPoolExecutor(max(1, opened.parallel), thread_name_prefix="roundel-work")
        self.most = max(1, opened.parallel)

    def submit(self, part: PartT) -> Future[Arrays]:
        """Hand in a part."""
        return self._pool.submit(self._opened, part)

    def result(self, future: Future[Arrays]) -> Arrays:
        """Wait for a part."""
        return future.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
