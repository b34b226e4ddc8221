"""How a run works: where, and what it remembers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass

from roundel.errors import RecipeError, did_you_mean
from roundel.types import Arrays
from roundel.work.checkpoints import Memory, Store
from roundel.work.cluster import RayExecutor
from roundel.work.executors import Executor, LocalExecutor, PartT, ProcessExecutor, Session, Task


@dataclass(frozen=True, slots=True)
class Work:
    """Where a run's parts are worked on and written down.

    Attributes:
        executor: None for this process.
        store: None where nothing is written down.
        device: the number of the GPU that runs models, or None for the CPU.
    """

    executor: Executor | None = None
    store: Store | None = None
    device: int | None = None

    @property
    def alone(self) -> bool:
        """Whether there is nothing to send and nothing to write down."""
        return self.store is None and (self.executor is None or isinstance(self.executor, LocalExecutor))

    @property
    def threads(self) -> int | None:
        """How many threads the user wants in this process, if that was said."""
        return self.executor.workers if isinstance(self.executor, LocalExecutor) else None

    @property
    def sees_files(self) -> bool:
        """Whether workers can read the files that this process can."""
        return self.executor is None or self.executor.sees_files

    def memory(self, step: str, key: Mapping[str, str]) -> Memory | None:
        """What is known about a step."""
        return None if self.store is None else self.store.memory(step, key)


def mapped(
    work: Work, task: Task[PartT], parts: Iterable[PartT], memory: Memory | None = None
) -> Iterator[tuple[PartT, Arrays]]:
    """Every part with its results, in the order of the parts; each is written down when its turn has come.

    Raises:
        RoundelError: as the task raised it.
        ExecutorError: workers died too often.
        DataError: what was written down is damaged, or of another run.
    """
    waiting: deque[tuple[PartT, Arrays | Future[Arrays]]] = deque()
    session: Session[PartT] | None = None

    def take() -> tuple[PartT, Arrays]:
        part, found = waiting.popleft()
        if not isinstance(found, Future):
            return part, found
        assert session is not None
        results = session.result(found)
        if memory is not None:
            memory.save(part.number, results, part.digest)
        return part, results

    with ExitStack() as stack:
        for part in parts:
            known = memory.load(part.number, part.digest) if memory is not None else None
            if known is not None:
                waiting.append((part, known))
            else:
                if session is None:  # where all parts are known, no worker starts
                    session = stack.enter_context((work.executor or LocalExecutor()).start(task))
                waiting.append((part, session.submit(part)))
            while waiting and (session is None or len(waiting) > session.most):
                yield take()
        while waiting:
            yield take()


NAMES = ("local", "processes", "ray")


def executor(
    name: str, *, address: str | None = None, workers: int | None = None, shared_files: bool = False
) -> Executor:
    """Where work runs.

    Args:
        name: local (threads of this process), processes (of this machine), or ray (a cluster).
        address: of a running Ray cluster; without one, Ray starts on this machine.
        workers: how many at once; one to a core when not given.
        shared_files: the machines of a Ray cluster see this machine's files under the same names, so that
            workers read the data themselves; otherwise it is sent to them.

    Raises:
        RecipeError: there is no such executor, or an option does not belong to it.
    """
    if name not in NAMES:
        raise RecipeError(
            f"There is no executor '{name}'.", expected=", ".join(NAMES), hint=did_you_mean(name, NAMES)
        )
    if workers is not None and workers < 1:
        raise RecipeError("There are too few workers.", observed=workers, expected="1 or more")
    if shared_files and address is None:
        raise RecipeError(
            "Shared files are for a Ray cluster of several machines.",
            expected="--executor ray --address …, too",
        )
    if address is not None and name != "ray":
        raise RecipeError(
            "An address is for Ray.",
            where=f"--address {address}",
            observed=f"executor {name}",
            expected="ray",
        )
    if name == "ray":
        return RayExecutor(address, workers, shared_files)
    return ProcessExecutor(workers) if name == "processes" else LocalExecutor(workers)
