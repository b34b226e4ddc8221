"""Runs the benchmark's scripts in their environments, each in a fresh process. Standard library only."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models import REPO_ROOT, SHARED_DIR
from records import RESULT_PREFIX, Failure

MESSAGE_LENGTH = 300
SYSTEM_PATH = re.compile(r"/(?:home|lib|lib64|mnt|opt|private|root|srv|tmp|usr|Users|var)/(?:[\w.+@-]+/)*")


def scrub(text: str) -> str:
    """Takes this machine's paths out of a text that goes into a committed file."""
    for path, shown in ((REPO_ROOT, "."), (SHARED_DIR, "../shared"), (Path.home(), "~")):
        text = text.replace(str(path), shown)
    for variable, value in os.environ.items():
        if variable.startswith("ROUNDEL_BENCH_ENV_") and value:
            text = text.replace(value, variable)
    # Paths below system folders keep only their last part. Not any path: tensor names look like paths too.
    return SYSTEM_PATH.sub("", text.replace(tempfile.gettempdir(), "TMP"))


def failure_of(log: str, returncode: int) -> Failure:
    """The message of a failed process: the last line that it wrote, which is the exception in Python."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    last = lines[-1] if lines else "no output"
    return Failure(scrub(f"exit status {returncode}: {last}")[:MESSAGE_LENGTH])


def run_script(
    python: Path, script: Path, arguments: Sequence[str], log: Path, timeout_s: float
) -> dict[str, Any] | Failure:
    """Runs a script that prints one result line.

    Args:
        python: Interpreter of the environment.
        script: The script.
        arguments: Its arguments.
        log: Where all that it prints is kept.
        timeout_s: Seconds after which it is stopped.

    Returns:
        The decoded result line, or the failure.
    """
    environment = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "PYTHONHOME"}}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w+") as stream:
        try:
            done = subprocess.run(
                [str(python), str(script), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Failure(f"stopped after {timeout_s:.0f} s")
        stream.seek(0)
        text = stream.read()
    if done.returncode:
        return failure_of(text, done.returncode)
    for line in reversed(text.splitlines()):
        # A tool's progress bar may stand before the result on the same line.
        _, prefix, payload = line.partition(RESULT_PREFIX)
        if prefix:
            result: dict[str, Any] = json.loads(payload)
            return result
    return Failure("ended without an error and without a result")
