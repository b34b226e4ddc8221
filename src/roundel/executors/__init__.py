"""Where work runs: in this process, in several of them, or on a Ray cluster; results are the same bits."""

from roundel.executors.choose import NAMES, executor
from roundel.executors.protocol import Executor, Opened, Part, Session, Task
from roundel.executors.work import Work, mapped

__all__ = [
    "NAMES",
    "Executor",
    "Opened",
    "Part",
    "Session",
    "Task",
    "Work",
    "executor",
    "mapped",
]
