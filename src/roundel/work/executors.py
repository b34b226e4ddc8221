"""Where a run works: a task, opened once in each worker, turns parts into plain arrays.

What a part gives depends on the task and the part alone, never on the worker, on the number of workers or on
the order in which they finish. Whoever puts the results together does so in the order of the parts.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, BinaryIO, Generic, Protocol, Self, TypeVar, cast

from roundel.errors import DependencyError, ExecutorError, RecipeError
from roundel.types import Arrays
from roundel.work.checkpoints import Store
from roundel.work.worker import receive, send

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


@dataclass(frozen=True, slots=True, eq=False)
class Ready(Generic[PartT]):
    """An opened task that is one function.

    Attributes:
        work: gives the results of one part.
        parallel: how many parts it can work on at once.
    """

    work: Callable[[PartT], Arrays]
    parallel: int = 1

    def __call__(self, part: PartT) -> Arrays:
        """The results of one part."""
        return self.work(part)


class Task(Protocol[PartT_contra]):
    """What all parts have in common; it travels by pickle, once to each worker."""

    def open(self, cores: int) -> Opened[PartT_contra]:
        """Get ready to work.

        Args:
            cores: how many threads may work in all.
        """


class Session(ABC, Generic[PartT]):
    """Workers that have a task; leaving the context ends all work.

    Attributes:
        most: parts to hand in before the first result is waited for.
    """

    most: int

    @abstractmethod
    def submit(self, part: PartT) -> Future[Arrays]:
        """Hand in a part."""

    def result(self, future: Future[Arrays]) -> Arrays:
        """Wait for a part.

        Raises:
            RoundelError: as the task raised it.
            ExecutorError: workers died too often.
        """
        return future.result()

    @abstractmethod
    def end(self) -> None:
        """End all work."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class Executor(ABC):
    """A way to run tasks."""

    @property
    def sees_files(self) -> bool:
        """Whether workers can read the files that this process can."""
        return True

    @abstractmethod
    def start(self, task: Task[PartT]) -> Session[PartT]:
        """Workers for a task."""


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_turn(
    pool: ThreadPoolExecutor, work: Callable[[_Item], _Result], items: Iterable[_Item], most: int
) -> Iterator[_Result]:
    """Results in the order of the items; no more than `most` of them wait, for they may be large."""
    waiting: deque[Future[_Result]] = deque()
    for item in items:
        waiting.append(pool.submit(work, item))
        if len(waiting) > most:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def usable_cores() -> int:
    """What this process may use, which in a container is less than what the machine has."""
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable is not None else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class LocalExecutor(Executor):
    """Works in this process.

    Attributes:
        workers: threads; None for every core.
    """

    workers: int | None = None

    def start(self, task: Task[PartT]) -> LocalSession[PartT]:
        """Threads for a task."""
        return LocalSession(task.open(self.workers or usable_cores()))


class LocalSession(Session[PartT]):
    """Threads that share an opened task."""

    def __init__(self, opened: Opened[PartT]) -> None:
        self._opened = opened
        self._pool = ThreadPoolExecutor(max(1, opened.parallel), thread_name_prefix="roundel-work")
        self.most = max(1, opened.parallel)

    def submit(self, part: PartT) -> Future[Arrays]:
        return self._pool.submit(self._opened, part)

    def end(self) -> None:
        self._pool.shutdown(cancel_futures=True)


@dataclass(frozen=True, slots=True)
class ProcessExecutor(Executor):
    """Works in processes of one thread each.

    They are started afresh, not forked (ONNX Runtime's threads do not survive that), and they do not import
    the caller's script, which therefore needs no `if __name__ == "__main__"`.

    Attributes:
        workers: processes; None for one to a core.
    """

    workers: int | None = None

    def start(self, task: Task[PartT]) -> ProcessSession[PartT]:
        """Processes for a task."""
        return ProcessSession(pickle.dumps(task, protocol=5), self.workers or usable_cores())


class _Died(Exception):  # noqa: N818  (it is an event, and handled)
    pass


class _Process:
    """One worker."""

    def __init__(self, task: bytes) -> None:
        # The same modules as here, and none that happen to lie in the current folder.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        command = [sys.executable, "-P", "-c", "from roundel.work.worker import main; main()"]
        environment = {**os.environ, "PYTHONPATH": path}
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self._in, self._out = cast(BinaryIO, self._child.stdin), cast(BinaryIO, self._child.stdout)
        self._task: bytes | None = task

    def ask(self, part: Any) -> Arrays:
        try:
            if self._task is not None:
                send(self._in, self._task)
                self._task = None
            send(self._in, pickle.dumps(part, protocol=5))
            well, answer = receive(self._out)
        except (EOFError, OSError, ValueError) as error:  # ValueError: closed from this side
            raise _Died from error
        if well:
            return cast(Arrays, answer)
        raise answer

    def end(self) -> None:
        self._child.kill()
        self._child.wait()
        for pipe in (self._in, self._out):
            try:
                pipe.close()
            except OSError:  # what was still to be written has nobody to read it
                continue


class ProcessSession(Session[PartT]):
    """Processes that have a task, each with a thread here that talks to it."""

    def __init__(self, task: bytes, workers: int) -> None:
        self._task = task
        self._free: SimpleQueue[_Process | None] = SimpleQueue()
        for _ in range(workers):
            self._free.put(None)  # started when there is something to do
        self._alive: set[_Process] = set()
        self._closing = False
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="roundel-worker")
        self.most = 2 * workers

    def submit(self, part: PartT) -> Future[Arrays]:
        return self._pool.submit(self._work, part)

    def _work(self, part: PartT) -> Arrays:
        process = self._free.get()
        try:
            for _ in range(1 + RETRIES):
                if self._closing:
                    break
                if process is None:
                    process = _Process(self._task)
                    self._alive.add(process)
                try:
                    return process.ask(part)
                except _Died:
                    self._alive.discard(process)
                    process.end()
                    process = None
        finally:
            self._free.put(process)
        raise ExecutorError(
            "Worker processes died again and again on the same piece of work.",
            where=f"part {part.number}",
            observed=f"{1 + RETRIES} tries",
            hint="Most often memory ran out: use fewer --workers.",
        )

    def end(self) -> None:
        self._closing = True
        for process in list(self._alive):
            process.end()
        self._pool.shutdown(cancel_futures=True)
        for process in list(self._alive):  # started while the others ended
            process.end()


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


def mapped(
    work: Work,
    task: Task[PartT],
    parts: Iterable[PartT],
    step: str = "",
    key: Callable[[], Mapping[str, str]] = dict,
) -> Iterator[tuple[PartT, Arrays]]:
    """Every part with its results, in the order of the parts; each is written down when its turn has come.

    Args:
        work: where, and what is remembered.
        task: turns parts into arrays; it travels by pickle where work is done elsewhere.
        parts: of the work.
        step: the name under which the results are remembered.
        key: what they depend on besides the parts.

    Raises:
        RoundelError: as the task raised it.
        ExecutorError: workers died too often.
        DataError: what was written down is damaged, or of another run.
    """
    memory = None if work.store is None else work.store.memory(step, key())
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
        raise RecipeError.unknown(f"There is no executor '{name}'.", name, NAMES)
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


_OPENED: dict[str, Any] = {}
"""In a worker: the opened task, by the session that it belongs to; one at a time."""


@dataclass(frozen=True, slots=True)
class RayExecutor(Executor):
    """Works in a Ray cluster, where Roundel must be installed on every machine.

    Attributes:
        address: of a running cluster ('auto', 'host:6379', 'ray://host:10001'); None starts one here.
        workers: parts that run at once, one core each; None for every core of the cluster.
        shared_files: all machines see the files of this one, under the same names.
    """

    address: str | None = None
    workers: int | None = None
    shared_files: bool = False

    @property
    def sees_files(self) -> bool:
        return self.address is None or self.shared_files

    def start(self, task: Task[PartT]) -> RaySession[PartT]:
        """The cluster's workers for a task.

        Raises:
            DependencyError: Ray is not installed.
            ExecutorError: the cluster cannot be reached.
        """
        ray = _ray()
        if not ray.is_initialized():
            self._connect(ray)
        cores = max(1, int(ray.cluster_resources().get("CPU", 1)))
        # Parts in waiting keep the cores busy; a part of a cluster is kept to by handing in no more.
        return RaySession(ray, task, min(self.workers or 2 * cores, 2 * cores))

    def _connect(self, ray: Any) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing leaves the cluster
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            if self.address is None:
                ray.init(address="local", num_cpus=self.workers, include_dashboard=False, **quiet)
            else:
                ray.init(address=self.address, **quiet)
        except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
            raise ExecutorError(
                "The Ray cluster cannot be reached.",
                where=self.address or "this machine",
                observed=" ".join(str(error).split())[:300],
                hint="Start one with `ray start --head`, or leave --address out for one on this machine.",
            ) from error


class RaySession(Session[PartT]):
    """A cluster that has a task. Ray runs a part again where its worker or its machine died."""

    def __init__(self, ray: Any, task: Task[PartT], most: int) -> None:
        self._ray = ray
        self._name = uuid.uuid4().hex
        # In a list, so that Ray hands the reference on and each worker fetches the task once.
        self._task = [ray.put(task)]
        self._run = ray.remote(num_cpus=1, max_retries=RETRIES)(_work)
        self._waiting: set[Any] = set()
        self.most = most

    def submit(self, part: PartT) -> Future[Arrays]:
        reference = self._run.remote(self._name, self._task, part)
        self._waiting.add(reference)
        future = cast("Future[Arrays]", reference.future())
        future.add_done_callback(lambda _: self._waiting.discard(reference))
        return future

    def result(self, future: Future[Arrays]) -> Arrays:
        errors = self._ray.exceptions
        try:
            return future.result()
        except errors.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        except errors.RayError as error:
            raise ExecutorError(
                "Ray's workers died again and again on the same piece of work.",
                observed=" ".join(str(error).split())[:300],
                hint="Most often memory ran out: use fewer --workers, or machines with more memory.",
            ) from error

    def end(self) -> None:
        for reference in list(self._waiting):
            self._ray.cancel(reference, force=True)


def _work(name: str, task: list[Any], part: Any) -> Arrays:
    """In a worker: open the task once, then do parts of it."""
    if name not in _OPENED:
        import ray

        _OPENED.clear()
        _OPENED[name] = ray.get(task[0]).open(1)
    return cast(Arrays, _OPENED[name](part))


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise DependencyError(
            "Ray is not installed.", hint="Install it with: pip install 'roundel[ray]'"
        ) from error
    return ray
