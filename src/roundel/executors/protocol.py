"""The one protocol: a task, opened once in each worker, turns parts into plain arrays.

What a part gives depends on the task and the part alone, never on the worker, on the number of workers or on
the order in which they finish. Whoever puts the results together does so in the order of the parts.
"""

from __future__ import annotations

from concurrent.futures import Future
from types import TracebackType
from typing import Protocol, Self, TypeVar

from roundel.types import Arrays

RETRIES = 3
"""How often a part runs again after its worker died."""


class Part(Protocol):
    """A piece of work; it travels by pickle."""

    @property
    def number(self) -> int:
        """Its place among the parts."""

    @property
    def digest(self) -> str:
        """Of what it works on."""


PartT = TypeVar("PartT", bound=Part)
PartT_contra = TypeVar("PartT_contra", bound=Part, contravariant=True)


class Opened(Protocol[PartT_contra]):
    """A task in a worker, with its models loaded."""

    @property
    def parallel(self) -> int:
        """How many parts it can work on at once, each in a thread of its own."""

    def __call__(self, part: PartT_contra) -> Arrays:
        """The results of one part."""


class Task(Protocol[PartT_contra]):
    """What all parts have in common; it travels by pickle, once to each worker."""

    def open(self, cores: int) -> Opened[PartT_contra]:
        """Get ready to work.

        Args:
            cores: how many threads may work in all.
        """


class Session(Protocol[PartT_contra]):
    """Workers that have a task."""

    @property
    def most(self) -> int:
        """How many parts to hand in before the first result is waited for."""

    def submit(self, part: PartT_contra) -> Future[Arrays]:
        """Hand in a part."""

    def result(self, future: Future[Arrays]) -> Arrays:
        """Wait for a part.

        Raises:
            RoundelError: as the task raised it.
            ExecutorError: workers died too often.
        """

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all work."""


class Executor(Protocol):
    """A way to run tasks."""

    @property
    def name(self) -> str:
        """In words, for people."""

    @property
    def sees_files(self) -> bool:
        """Whether workers can read the files that this process can."""

    def start(self, task: Task[PartT]) -> Session[PartT]:
        """Workers for a task."""
