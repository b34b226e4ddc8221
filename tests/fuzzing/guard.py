"""Watches a process from inside: files opened for writing, pickles, sockets and programs it starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_FORBIDDEN = (
    *("pickle.find_class", "socket.connect", "socket.bind", "socket.getaddrinfo"),
    *("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"),
)
_WRITES = {
    "os.remove": (0,),
    "os.rename": (0, 1),
    "os.mkdir": (0,),
    "os.rmdir": (0,),
    "os.symlink": (1,),
    "os.link": (1,),
    "os.truncate": (0,),
    "os.chmod": (0,),
    "shutil.rmtree": (0,),
}
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Guard:
    """An audit hook that notes, while it is on, what the code of a case may not do."""

    def __init__(self) -> None:
        self._roots: tuple[str, ...] | None = None
        self.seen: list[str] = []
        sys.addaudithook(self._hear)

    @contextmanager
    def allowing(self, *folders: Path) -> Iterator[list[str]]:
        """Writing is allowed below these folders and nowhere else; yields the list of offences."""
        self.seen = []
        self._roots = tuple(os.path.realpath(folder) for folder in folders)
        try:
            yield self.seen
        finally:
            self._roots = None

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._roots is None:
            return
        if event in _FORBIDDEN:
            self.seen.append(f"{event} {str(arguments)[:200]}")
        elif event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITE_FLAGS:
            self._judge("open for writing", arguments[0])
        elif event in _WRITES:
            for position in _WRITES[event]:
                self._judge(event, arguments[position])

    def _judge(self, what: str, path: Any) -> None:
        if isinstance(path, int) or path is None:
            return
        roots, self._roots = self._roots, None  # realpath may itself be audited
        assert roots is not None
        try:
            real = os.path.realpath(os.fsdecode(path))
        except ValueError:
            real = repr(path)
        finally:
            self._roots = roots
        if real != os.devnull and not any(real == root or real.startswith(root + os.sep) for root in roots):
            self.seen.append(f"{what} {real}")
