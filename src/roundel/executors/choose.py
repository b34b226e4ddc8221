"""An executor by its name."""

from __future__ import annotations

from roundel.errors import RecipeError, did_you_mean
from roundel.executors.cluster import RayExecutor
from roundel.executors.local import LocalExecutor
from roundel.executors.processes import ProcessExecutor
from roundel.executors.protocol import Executor

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
