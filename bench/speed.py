"""How long each tool takes on every model of the zoo, with the accuracy and the memory.

``python bench/speed.py [--models a,b] [--samples 8,100] [--formats xint8,a8w8] [--peers roundel,quark]``.
Standard library only. Rows that are there already are not measured again without ``--again`` (Roundel's: when
they are of the same commit).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import environments
import machine
import plot
from contenders import parse_contender
from models import BENCH_DIR, WORK_DIR, BenchSetupError, require_shared
from processes import run_script, scrub
from records import Contender, Failure
from run import say, slug

# What a user would take who reads each tool's documents: the plain preset, nothing added.
FORMATS: dict[str, dict[str, str]] = {
    "xint8": {
        "roundel": "roundel:xint8",
        "roundel:none": "roundel:xint8@effort=none",
        "quark": "quark:XINT8",
    },
    "a8w8": {
        "roundel": "roundel:a8w8",
        "roundel:none": "roundel:a8w8@effort=none",
        "quark": "quark:A8W8",
        "ort": "ort:int8_tensor",
        "nncf": "nncf:performance",
    },
    "a16w8": {
        "roundel": "roundel:a16w8",
        "roundel:none": "roundel:a16w8@effort=none",
        "quark": "quark:A16W8",
        "ort": "ort:int16_channel",
    },
}
PEERS = ("roundel", "roundel:none", "quark", "ort", "nncf")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One model, format and number of samples: what all contenders get alike."""

    model: str
    format: str
    samples: int
    folder: Path


@dataclass(frozen=True, slots=True)
class Bench:
    """What stays the same during a run.

    Attributes:
        pythons: Interpreter by environment, or why there is none.
        library: Quark's custom-op library.
        timeout_s: Seconds per process.
        repeat: How often each contender runs on a case; the median counts.
        revision: State of the repository.
        started: When the run began; only times of one run may be compared.
    """

    pythons: Mapping[str, Path | Failure]
    library: str
    timeout_s: float
    repeat: int
    revision: str
    started: float

    def call(self, environment: str, script: str, arguments: Sequence[object], log: str) -> Any:
        """Runs one of the benchmark's scripts; its result line, or the failure."""
        python = self.pythons[environment]
        if isinstance(python, Failure):
            return python
        words = [str(word) for word in arguments]
        return run_script(
            python, BENCH_DIR / script, words, WORK_DIR / "logs" / "speed" / f"{log}.log", self.timeout_s
        )


def output_path(case: Case, contender: Contender) -> Path:
    """Where a contender's file goes."""
    return WORK_DIR / "out" / case.model / f"{slug(contender)}.{case.samples}.onnx"


def quantize(bench: Bench, case: Case, contender: Contender) -> Any:
    """One quantization in a fresh process; what it reports, with the wall time of the whole process."""
    arguments = ["--model", case.folder / "model.onnx", "--calib", case.folder / "calib.npz"]
    arguments += ["--count", case.samples, "--preset", contender.preset]
    arguments += ["--output", output_path(case, contender), "--options", json.dumps(dict(contender.options))]
    log = f"{case.model}.{slug(contender)}.{case.samples}"
    started = time.perf_counter()
    found = bench.call(contender.peer, f"peers/{contender.peer}_peer.py", arguments, log)
    return found if isinstance(found, Failure) else {**found, "process_s": time.perf_counter() - started}


def judge(bench: Bench, case: Case, contender: Contender) -> Any:
    """The accuracy of a contender's file on samples that calibration has not seen."""
    arguments = ["--float", case.folder / "model.onnx", "--data", case.folder / "unseen.npz"]
    arguments += ["--quantized", output_path(case, contender)]
    environment = "ort"
    if contender.peer == "quark":
        environment = "quark"
        arguments += ["--library", bench.library]
    return bench.call(environment, "judge.py", arguments, f"{case.model}.{slug(contender)}.judge")


def measure(bench: Bench, case: Case, contenders: Mapping[str, Contender], first: int) -> list[Row]:
    """All contenders on one case, alternating, with the given one first; a row for each."""
    arguments = ["--model", case.folder / "model.onnx", "--calib", case.folder / "calib.npz"]
    forward = bench.call(
        "ort", "peers/forward.py", [*arguments, "--count", case.samples], f"{case.model}.forward"
    )
    if isinstance(forward, Failure):
        raise BenchSetupError(f"the float forward pass of {case.model} failed: {forward.message}")
    runs: dict[str, list[Any]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(first, first + bench.repeat):
        # Another one starts each time, so that none always has the cold caches.
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            runs[name].append(quantize(bench, case, contenders[name]))
            say(f"{case.model} {case.format} {case.samples} {name}: {shown(runs[name][-1])}")
    shared = {
        "model": case.model,
        "format": case.format,
        "samples": case.samples,
        "used": forward["samples"],
        "forward_s": forward["forward_s"] / forward["samples"],
        "revision": bench.revision,
        "run": bench.started,
        "load": os.getloadavg()[0],
    }
    return [
        {**shared, "contender": name, **judged(bench, case, contenders[name], runs[name])}
        for name in contenders
    ]


def judged(bench: Bench, case: Case, contender: Contender, runs: Sequence[Any]) -> Row:
    """The medians of a contender's runs, and its accuracy; or the message of what failed."""
    failed = next((run for run in runs if isinstance(run, Failure)), None)
    if failed is not None:
        return {"error": scrub(failed.message)}
    times = ("wall_s", "cpu_s", "process_s", "process_cpu_s", "peak_rss_mb")
    row: Row = {key: statistics.median(run[key] for run in runs) for key in times}
    row |= {"walls": [run["wall_s"] for run in runs], "versions": runs[-1]["versions"]}
    score = judge(bench, case, contender)
    if isinstance(score, Failure):
        return row | {"error": f"not judged: {score.message}"}
    # A tool that finds nothing to do is quick and exact, and must not count as either.
    row |= score if score["quantizers"] else {**score, "error": "nothing in the file is quantized"}
    return row


def shown(found: Any) -> str:
    """A result for the line of progress."""
    return f"FAILED {found.message}" if isinstance(found, Failure) else f"{found['wall_s']:.2f} s"


def key_of(row: Row) -> tuple[object, ...]:
    """What a row is about."""
    return row["model"], row["format"], row["samples"], row["contender"]


def missing(case: Case, names: Iterable[str], rows: Mapping[Any, Row], revision: str) -> dict[str, Contender]:
    """The contenders that still have to run on a case."""
    found = {}
    for name in names:
        text = FORMATS[case.format].get(name)
        row = rows.get((case.model, case.format, case.samples, name))
        # A tree with changes has no name: what was measured there may have been another one.
        own = name.startswith("roundel")
        current = row is not None and not (own and (row["revision"] != revision or "changes" in revision))
        if text is not None and not current:
            found[name] = parse_contender(text)
    return found


def prepare(models: Sequence[str], peers: Sequence[str], zoo: Path) -> tuple[dict[str, Path | Failure], str]:
    """Environments and models made ready; the interpreters, and Quark's library."""
    require_shared()
    pythons: dict[str, Path | Failure] = {"ort": environments.ensure("ort")}
    library = ""
    for name in dict.fromkeys(peer.partition(":")[0] for peer in peers):
        try:
            pythons[name] = environments.ensure(name)
            last = environments.warm_up(name, environments.ensure(name))
            library = last if name == "quark" else library
        except BenchSetupError as error:
            # One tool that cannot be installed must not keep the others from being measured.
            say(f"{name}: {error}")
            pythons[name] = Failure(scrub(str(error)))
    try:
        environments.run_in("ort", ["zoo.py", "fetch", *models, "--to", str(zoo)])
    except BenchSetupError as error:
        say(f"{error}; the others go on")
    return pythons, library


def limit(format_: str, quark_s: float) -> float:
    """The time that Roundel's default effort is to stay under, beside Quark's plain preset."""
    return 0.5 * quark_s if format_ == "xint8" else 2 * quark_s + 1


def as_markdown(data: Mapping[str, Any]) -> str:
    """All rows as tables, one for each format and number of samples."""
    lines = ["# Time to quantize", "", ", ".join(f"{k}: {v}" for k, v in data["machine"].items()), ""]
    lines += [
        "Seconds of the quantize call alone, each in a fresh process, alternating. SQNR in dB on unseen",
        "samples: of the worst output, in brackets over all. `bench/speed.py` makes this page; the JSON",
        "beside it has CPU seconds, whole processes and file sizes too.",
    ]
    for title, rows in panels(data["rows"]).items():
        lines += ["", f"## {title}", "", *table(rows)]
    failed = [
        f"- {' '.join(map(str, key_of(row)))}: {row['error']}" for row in data["rows"] if "error" in row
    ]
    refused = [
        f"- {' '.join(map(str, key_of(row)))}: {row['stock_error']}"
        for row in data["rows"]
        if row.get("stock_error")
    ]
    lines += ["", "## Failures", "", *failed] if failed else []
    lines += ["", "## Files that a plain ONNX Runtime session refuses", "", *refused] if refused else []
    return "\n".join(lines) + "\n"


def panels(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, Row]]]:
    """Rows by format and samples, then model, then contender."""
    found: dict[str, dict[str, dict[str, Row]]] = {}
    for row in sorted(rows, key=lambda row: (list(FORMATS).index(row["format"]), row["samples"])):
        title = f"{row['format'].upper()}, {row['samples']} samples"
        found.setdefault(title, {}).setdefault(row["model"], {})[row["contender"]] = row
    return found


def table(models: Mapping[str, Mapping[str, Row]]) -> list[str]:
    """The lines of one table, and how many models keep the limits."""
    present = [peer for peer in PEERS if any(peer in rows for rows in models.values())]
    head = ["model", "forward ms", *(f"{peer} s" for peer in present), "roundel / quark", "CPU", "MB, MB"]
    head += [f"{peer} dB" for peer in present]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    fast = exact = compared = 0
    for model, rows in sorted(models.items()):
        ours, theirs = rows.get("roundel", {}), rows.get("quark", {})
        any_row = next(iter(rows.values()))
        cells = [model if any_row["used"] == any_row["samples"] else f"{model} ({any_row['used']} samples)"]
        cells.append(f"{1000 * any_row['forward_s']:.1f}")
        cells += [number(rows.get(peer, {}).get("wall_s"), 2) for peer in present]
        cells += [ratio(ours, theirs, "wall_s"), ratio(ours, theirs, "cpu_s")]
        cells.append(", ".join(number(row.get("peak_rss_mb"), 0) for row in (ours, theirs)))
        cells += [quality(rows.get(peer, {})) for peer in present]
        lines.append("| " + " | ".join(cells) + " |")
        if all("wall_s" in row and "error" not in row for row in (ours, theirs)):
            compared += 1
            fast += ours["wall_s"] <= limit(ours["format"], theirs["wall_s"])
            exact += decibels(ours) >= decibels(theirs)
    if compared:
        lines += ["", f"Of {compared} models: {fast} within the time, {exact} at least as exact as Quark."]
    return lines


def decibels(row: Row) -> float:
    """A row's SQNR for comparing; no noise is the best there is, no file the worst."""
    if "sqnr_min_db" not in row:
        return float("-inf")
    value = row["sqnr_min_db"]
    return float("inf") if value is None else float(value)


def number(value: float | None, digits: int) -> str:
    """A cell of the table."""
    return "" if value is None else f"{value:.{digits}f}"


def ratio(ours: Row, theirs: Row, key: str) -> str:
    """Ours as a multiple of theirs; marked where they are of different runs."""
    if any(key not in row or "error" in row for row in (ours, theirs)):
        return ""
    return f"{ours[key] / theirs[key]:.2f}" + ("" if ours["run"] == theirs["run"] else " (other run)")


def quality(row: Row) -> str:
    """Worst output, and all outputs where that is another figure."""
    if "error" in row:
        return "failed"
    if "sqnr_min_db" not in row:
        return ""
    worst, whole = row["sqnr_min_db"], row["sqnr_db"]
    if worst is None:
        return "equal"
    same = whole is None or abs(worst - whole) < 0.05
    return f"{worst:.1f}" if same else f"{worst:.1f} ({whole:.1f})"


def write(data: Mapping[str, Any], out: Path) -> None:
    """The raw rows, the page and the picture."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    out.with_suffix(".md").write_text(as_markdown(data))
    walls = {
        title: {
            model: {name: row["wall_s"] for name, row in rows.items() if "wall_s" in row}
            for model, rows in sorted(models.items())
        }
        for title, models in panels(data["rows"]).items()
    }
    filled = {title: models for title, models in walls.items() if any(models.values())}
    if filled:
        out.with_suffix(".svg").write_text(plot.dots(filled, "seconds"))


def main() -> int:
    """Command line entry; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", help="comma-separated names of the zoo; default: all")
    parser.add_argument("--samples", default="8,100")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--zoo", type=Path, default=WORK_DIR / "zoo", help="folder with the models")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds per process")
    parser.add_argument("--again", action="store_true", help="also what has been measured already")
    parser.add_argument("--out", type=Path, default=BENCH_DIR / "results" / "speed.json")
    given = parser.parse_args()
    peers, formats = given.peers.split(","), given.formats.split(",")
    if set(peers) - set(PEERS) or set(formats) - set(FORMATS):
        parser.error(f"peers are {', '.join(PEERS)}; formats are {', '.join(FORMATS)}")
    models = given.models.split(",") if given.models else []
    stored = json.loads(given.out.read_text())["rows"] if given.out.exists() else []
    rows = {key_of(row): row for row in stored}
    try:
        pythons, library = prepare(models, peers, given.zoo.resolve())
        bench = Bench(pythons, library, given.timeout, given.repeat, machine.revision(), time.time())
        description = machine.describe()
        folders = [folder for folder in ready(given.zoo.resolve()) if not models or folder.name in models]
        counts = [int(count) for count in given.samples.split(",")]
        for first, (folder, form, count) in enumerate(itertools.product(folders, formats, counts)):
            case = Case(folder.name, form, count, folder)
            wanted = missing(case, peers, {} if given.again else rows, bench.revision)
            if wanted:
                rows |= {key_of(row): row for row in measure(bench, case, wanted, first)}
                # After each case, so that a run that is stopped leaves what it has.
                write({"machine": description, "rows": list(rows.values())}, given.out)
    except BenchSetupError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    return 0


def ready(zoo: Path) -> list[Path]:
    """The folders of the complete models."""
    return sorted(path.parent for path in zoo.glob("*/unseen.npz"))


if __name__ == "__main__":
    sys.exit(main())
