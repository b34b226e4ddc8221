"""Linear algebra on one thread, so that a result does not depend on how many there are.

With several threads BLAS adds up in another order: the last bits of a sum change, and with them, now and
then, a code. The matrices of a layer are small, too: threads wait for each other longer than they compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock

from threadpoolctl import ThreadpoolController


class _SharedLimit:
    """The limit is the process's: the first who wants it sets it, and the last one lifts it."""

    def __init__(self) -> None:
        self._lock, self._users, self._set = Lock(), 0, ExitStack()
        self._libraries: ThreadpoolController | None = None

    def enter(self) -> None:
        with self._lock:
            if self._libraries is None:  # once, for searching takes milliseconds
                self._libraries = ThreadpoolController()
            if self._users == 0:
                self._set.enter_context(self._libraries.limit(limits=1, user_api="blas"))
            self._users += 1

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._set.close()


_limit = _SharedLimit()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """One thread of BLAS within; runs within runs, and in several threads at once, may all ask for it."""
    _limit.enter()
    try:
        yield
    finally:
        _limit.leave()
