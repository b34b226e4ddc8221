"""Bent models, recipes and array files through load, plan, quantize and verify, for a given time.

    python scripts/fuzz.py --seconds 3600 --seed 1 --log findings.jsonl
    python scripts/fuzz.py --seed 1 --case 1234          one case again, with its traceback

Cases run in a child process with a limit on memory, on one core. When it dies, takes too much time for one
case, raises anything but Roundel's own errors, writes where it may not, loads a pickle or touches the
network, that is a finding: it is counted, and the next case runs in a fresh child.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import selectors
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

CPU_SECONDS = 60.0  # for one case; such small models take well below one
STALLED_SECONDS = 240.0  # without any progress in CPU time: a deadlock
MEMORY = 4 << 30  # address space; the libraries alone take more than one of them
CASES_PER_CHILD = 3000
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Tally:
    """What happened so far."""

    executions: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    slowest: tuple[float, int] = (0.0, -1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--log", type=Path, help="findings, one JSON object to a line")
    parser.add_argument("--case", type=int, help="run this case only, here")
    parser.add_argument("--keep", type=Path, help="with --case: the folder to leave its files in")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        return _child(given.seed, given.first)
    if given.case is not None:
        return _one(given.seed, given.case, given.keep)
    tally = fuzz(given.seed, given.seconds, given.first, given.log)
    print(
        f"{tally.executions} executions, {sum(tally.faults.values())} findings, {len(tally.faults)} different"
    )
    for name, count in tally.outcomes.most_common():
        print(f"  {count:7d} {name}")
    for name, count in tally.faults.most_common():
        print(f"  finding x{count}: {name}")
    print(f"  slowest case: {tally.slowest[1]} in {tally.slowest[0]:.1f} s")
    return 1 if tally.faults else 0


def fuzz(seed: int, seconds: float, first: int = 0, log: Path | None = None) -> Tally:
    """Run cases `first`, `first` + 1, … until the time is over."""
    tally, number, end = Tally(), first, time.monotonic() + seconds
    while time.monotonic() < end:
        number = _watch(seed, number, end, tally, log)
    return tally


def _watch(seed: int, number: int, end: float, tally: Tally, log: Path | None) -> int:
    """One child until it ends; the number of the next case."""
    command = [sys.executable, __file__, "--child", "--seed", str(seed), "--first", str(number)]
    # The folder is the parent's: a child that is killed cannot tidy up.
    with tempfile.TemporaryDirectory(prefix="roundel-fuzz-") as room, tempfile.TemporaryFile() as complaints:
        # Without a buffer: a line that was read ahead would wait for the next one, and blame another case.
        child = subprocess.Popen(
            command,
            bufsize=0,
            stdout=subprocess.PIPE,
            stderr=complaints,
            env={**os.environ, "TMPDIR": room},
        )
        assert child.stdout is not None
        current, started = -1, time.monotonic()
        try:
            for event in _events(child):
                if event is None:
                    if time.monotonic() > end:
                        return number
                    continue
                if "stuck" in event:
                    _found(tally, log, current, "?", f"takes too long ({event['stuck']})", "")
                    return current + 1
                if "start" in event:
                    current, started = event["start"], time.monotonic()
                    continue
                number = current + 1
                tally.executions += 1
                tally.outcomes[event["outcome"]] += 1
                tally.slowest = max(tally.slowest, (time.monotonic() - started, current))
                if event["finding"]:
                    _found(tally, log, **event["finding"])
                if time.monotonic() > end:
                    return number
        finally:
            child.kill()
            child.wait()
            child.stdout.close()
        if child.returncode == 0:
            return number
        complaints.seek(0)
        words = complaints.read()[-2000:].decode(errors="replace")
        _found(tally, log, current, "?", f"the process died with {child.returncode}", words)
        tally.executions += 1
        return max(current, number) + 1


def _events(child: subprocess.Popen[bytes]) -> Any:
    """What the child prints, None while it works, and a last word when it no longer gets on."""
    assert child.stdout is not None
    selector = selectors.DefaultSelector()
    selector.register(child.stdout, selectors.EVENT_READ)
    base, moved, last = _cpu(child.pid), time.monotonic(), _cpu(child.pid)
    while True:
        if not selector.select(timeout=2.0):
            used, now = _cpu(child.pid), time.monotonic()
            if used != last:
                last, moved = used, now
            if used - base > CPU_SECONDS:
                yield {"stuck": f"{used - base:.0f} s of CPU"}
            if now - moved > STALLED_SECONDS and not _paused(child.pid):
                yield {"stuck": "no progress"}
            yield None
            continue
        line = child.stdout.readline()
        if not line:
            child.wait()
            return
        base = last = _cpu(child.pid)
        moved = time.monotonic()
        yield json.loads(line)


def _cpu(pid: int) -> float:
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS
    return 0.0


def _paused(pid: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def _found(tally: Tally, log: Path | None, number: int, kind: str, fault: str, detail: str) -> None:
    tally.faults[fault] += 1
    if log is not None:
        line = json.dumps({"number": number, "kind": kind, "fault": fault, "detail": detail})
        with log.open("a") as file:
            file.write(line + "\n")


def _child(seed: int, first: int) -> int:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
    talk = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is not part of the talk
    box = _box(Path(tempfile.gettempdir()) / "case")
    for number in range(first, first + CASES_PER_CHILD):
        _say(talk, {"start": number})
        outcome, finding = box.run(seed, number)
        _say(talk, {"outcome": outcome, "finding": asdict(finding) if finding else None})
    return 0


def _say(talk: IO[str], what: dict[str, Any]) -> None:
    talk.write(json.dumps(what) + "\n")
    talk.flush()


def _box(root: Path) -> Any:
    import logging

    from fuzzing.cases import Sandbox
    from fuzzing.guard import Guard

    logging.disable(logging.CRITICAL)
    return Sandbox(root, Guard())


def _one(seed: int, number: int, keep: Path | None) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with tempfile.TemporaryDirectory(prefix="roundel-fuzz-") as folder:
        outcome, finding = _box(keep or Path(folder)).run(seed, number)
    print(outcome)
    if finding:
        print(f"{finding.kind}: {finding.fault}\n{finding.detail}")
    return 1 if finding else 0


if __name__ == "__main__":
    raise SystemExit(main())
