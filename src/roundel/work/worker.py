"""A worker process: reads a task and then parts from its standard input, and answers on standard output.

It ends when its input does: a parent that is killed leaves no worker behind. Nothing else unpickles.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from typing import Any, BinaryIO

_LENGTH = 8


def send(pipe: BinaryIO, blob: bytes) -> None:
    """One message."""
    pipe.write(len(blob).to_bytes(_LENGTH, "little"))
    pipe.write(blob)
    pipe.flush()


def receive(pipe: BinaryIO) -> Any:
    """The next message.

    Raises:
        EOFError: the other side is gone.
    """
    length = _exactly(pipe, _LENGTH)
    # Only ever what the parent or its own worker wrote into an anonymous pipe.
    return pickle.loads(_exactly(pipe, int.from_bytes(length, "little")))


def _exactly(pipe: BinaryIO, count: int) -> bytes:
    data = pipe.read(count)
    if len(data) < count:
        raise EOFError
    return data


def main() -> None:
    """Work until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
    inputs = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever libraries print must not end up between the answers
    opened: Any = None
    try:
        task = receive(inputs)
        while True:
            part = receive(inputs)
            try:
                opened = task.open(1) if opened is None else opened
                answer = True, opened(part)
            except Exception as error:  # noqa: BLE001  (whatever it is, the parent raises it)
                answer = False, portable(error)
            send(answers, pickle.dumps(answer, protocol=5))
    except (EOFError, BrokenPipeError):
        return


def portable(error: Exception) -> Exception:
    """The error itself where it survives the journey, else its words."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  (exceptions of other libraries fail to travel in many ways)
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
