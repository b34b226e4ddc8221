"""A Ray cluster, of this machine or of many. Ray itself is imported only here, and only when it is used."""

from __future__ import annotations

import os
import uuid
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

from roundel.errors import DependencyError, ExecutorError
from roundel.types import Arrays
from roundel.work.executors import RETRIES, Executor, PartT, Session, Task

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
