"""What every peer script shares: its arguments, the clock, and the one JSON line that it prints.

A peer script runs in the peer's own virtual environment, in a fresh process, for one quantization. Only numpy
may be imported here, because this module is imported in all of those environments.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

RESULT_PREFIX = "ROUNDEL_BENCH_RESULT "

# How bench/zoo.py marks the inputs in its files.
PREFIX = "input:"

Sample = dict[str, npt.NDArray[Any]]
Quantize = Callable[[list[Sample]], None]


@dataclass(frozen=True, slots=True)
class Job:
    """One quantization to run.

    Attributes:
        model: Float ONNX file.
        calib: npz file with the calibration array ``x`` (N, C, H, W), or one of the zoo.
        input_name: The model's input; a file of the zoo names them itself.
        count: How many samples of the file; all without it.
        preset: The peer's own name for what to do.
        output: File to write.
        options: Peer-specific settings; a peer refuses those that it does not know.
    """

    model: Path
    calib: Path
    input_name: str
    count: int | None
    preset: str
    output: Path
    options: Mapping[str, Any]

    def check_options(self, known: Sequence[str]) -> None:
        """Refuses options that the peer does not know, since a dropped option falsifies a comparison.

        Raises:
            ValueError: An option is unknown.
        """
        unknown = sorted(set(self.options) - set(known))
        if unknown:
            raise ValueError(f"unknown options {unknown}; this peer knows {sorted(known)}")


def parse_job(argv: Sequence[str] | None = None) -> Job:
    """Reads a job from the command line."""
    parser = argparse.ArgumentParser(description="Runs one quantization and prints one JSON line.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--calib", type=Path, required=True)
    parser.add_argument("--input-name", default="input")
    parser.add_argument("--count", type=int)
    parser.add_argument("--preset", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--options", type=json.loads, default={}, help="JSON object")
    args = parser.parse_args(argv)
    # Absolute paths, because a peer may change its working directory.
    return Job(
        model=args.model.resolve(),
        calib=args.calib.resolve(),
        input_name=args.input_name,
        count=args.count,
        preset=args.preset,
        output=args.output.resolve(),
        options=args.options,
    )


def load_samples(path: Path, input_name: str, count: int | None = None) -> list[Sample]:
    """Loads the calibration arrays into memory and cuts them into samples."""
    with np.load(path, allow_pickle=False) as stored:
        arrays = {
            name.removeprefix(PREFIX): stored[name][:count]
            for name in stored.files
            if name.startswith(PREFIX)
        }
        if not arrays:
            arrays = {input_name: stored["x"][:count, None]}
    # The ellipsis keeps a scalar input an array.
    length = len(next(iter(arrays.values())))
    return [{name: array[index, ...] for name, array in arrays.items()} for index in range(length)]


def cpu_seconds() -> float:
    """Processor time so far, of all threads and of ended children."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def peak_rss_mb(who: int = resource.RUSAGE_SELF) -> float:
    """Largest resident size so far, in MB (10**6 bytes), of this process or of its largest ended child."""
    peak = resource.getrusage(who).ru_maxrss
    # Linux counts kibibytes, macOS bytes.
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def versions_of(packages: Sequence[str]) -> dict[str, str]:
    """Installed versions of the given distributions, leaving out those that are not installed."""
    found: dict[str, str] = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def emit(result: Mapping[str, Any]) -> None:
    """Prints the result line; the prefix tells it from whatever the peer itself prints."""
    print(RESULT_PREFIX + json.dumps(result), flush=True)


def run_job(job: Job, load: Callable[[Job], Quantize], packages: Sequence[str]) -> None:
    """Runs one quantization and prints its result line.

    Imports and reading the images come before the clock starts; the peak memory is that of the whole process.

    Args:
        job: What to do.
        load: Imports the peer and returns the call to be timed.
        packages: Distributions whose versions belong in the result.

    Raises:
        FileNotFoundError: The peer returned without writing its output.
    """
    started = time.perf_counter()
    quantize = load(job)
    import_s = time.perf_counter() - started
    samples = load_samples(job.calib, job.input_name, job.count)
    rss_before = peak_rss_mb()
    # A file of an earlier run must not pass for this run's output.
    job.output.unlink(missing_ok=True)
    job.output.parent.mkdir(parents=True, exist_ok=True)
    started, cpu = time.perf_counter(), cpu_seconds()
    quantize(samples)
    wall_s, cpu_s = time.perf_counter() - started, cpu_seconds() - cpu
    if not job.output.exists():
        raise FileNotFoundError("the quantizer returned without an error and without writing its output")
    emit(
        {
            "wall_s": wall_s,
            "cpu_s": cpu_s,
            "process_cpu_s": cpu_seconds(),
            "import_s": import_s,
            "peak_rss_mb": peak_rss_mb(),
            "rss_before_mb": rss_before,
            "child_peak_rss_mb": peak_rss_mb(resource.RUSAGE_CHILDREN),
            "samples": len(samples),
            "output": str(job.output),
            "versions": versions_of(packages),
        }
    )
