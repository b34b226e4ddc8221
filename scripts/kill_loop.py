"""Kills runs at random moments, resumes them, and checks that each ends with the identical file.

    python scripts/kill_loop.py MODEL DATA --kills 20 -- -p xint8 --effort high

What follows `--` are options of `roundel quantize`. One run without a break gives the file to compare with
and the time to choose moments from. Then, for each kill: a run with a checkpoint of its own is killed
(SIGKILL) at a random moment, its output must be absent or whole, and the same command resumes and must write
the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path


def main() -> None:
    """Run the loop; the exit code is 1 where any file differs."""
    own, options = _split(sys.argv[1:])
    parser = argparse.ArgumentParser(description="Kill runs at random moments and resume them.")
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the outcome there")
    given = parser.parse_args(own)
    with tempfile.TemporaryDirectory(prefix="roundel-kill-") as folder:
        rows = run(given, options, Path(folder))
    wrong = [row for row in rows if not row["identical"]]
    early = sum(row["finished_before_the_kill"] for row in rows)
    print(f"{len(rows)} kills, {len(rows) - len(wrong)} identical files; {early} runs had ended before")
    if given.json is not None:
        tree = {"model": given.model.name, "options": options, "kills": rows}
        given.json.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    sys.exit(1 if wrong else 0)


def run(given: argparse.Namespace, options: list[str], folder: Path) -> list[dict[str, object]]:
    """One row for each kill."""
    choose = random.Random(given.seed)
    whole = folder / "whole.onnx"
    started = time.perf_counter()
    subprocess.run(_command(given, whole, None, options), check=True)
    took = time.perf_counter() - started
    expected = _digest(whole)
    print(f"a run without a break takes {took:.1f} s")
    rows = []
    for number in range(given.kills):
        moment = choose.uniform(0.0, took)
        out, memory = folder / f"{number}.onnx", folder / f"memory{number}"
        finished = _killed(_command(given, out, memory, options), moment)
        if out.exists() and _digest(out) != expected:  # it may be there, but then it is whole
            raise SystemExit(f"kill {number}: a killed run left an output that is not whole")
        parts = Counter(path.name.rsplit("-", 1)[0] for path in memory.glob("*.ckpt"))
        started = time.perf_counter()
        subprocess.run(_command(given, out, memory, options), check=True)
        row = {
            "moment_s": round(moment, 2),
            "done_before": dict(parts),
            "resumed_s": round(time.perf_counter() - started, 2),
            "identical": _digest(out) == expected,
            "finished_before_the_kill": finished,
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def _killed(command: list[str], moment: float) -> bool:
    """Whether the run ended before its moment came."""
    process = subprocess.Popen(command)
    try:
        return process.wait(moment) == 0
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False


def _command(given: argparse.Namespace, out: Path, memory: Path | None, options: list[str]) -> list[str]:
    words = ["quantize", given.model, "-o", out, "--data", given.data, "-q", *options]
    words += ["--checkpoint", memory, "--resume"] if memory is not None else []
    return [sys.executable, "-m", "roundel", *map(str, words)]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    place = words.index("--") if "--" in words else len(words)
    return words[:place], words[place + 1 :]


if __name__ == "__main__":
    main()
