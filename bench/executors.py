"""What a worker and the driver of a calibration take for each shard: the numbers that docs/scale.md rests on.

python bench/executors.py MODEL DATA [--preset xint8_plain] [--samples 64] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import pickle
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from roundel.calibrate.collect import ShardTask, collect
from roundel.calibrate.observers import OBSERVERS
from roundel.calibrate.resolve import requests_for
from roundel.data.shards import SIZE, shards
from roundel.model.files import Portable
from roundel.model.memory import Budget
from roundel.plan import build_plan
from roundel.recipe.load import load_recipe
from roundel.stages import open_data, prepare
from roundel.work.checkpoints import open_store
from roundel.work.executors import Work, executor


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Measure one worker and the driver.")
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--preset", default="xint8_plain")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = measured(given)
    for name, value in found.items():
        print(f"{name:40} {value}")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def measured(given: argparse.Namespace) -> dict[str, Any]:
    """Seconds and bytes, for each sample or shard."""
    recipe = load_recipe(given.preset, {"data": {"samples": given.samples}})
    ready = prepare(given.model, recipe)
    requests = requests_for(build_plan(ready.model, recipe), recipe)
    found: dict[str, Any] = {"model": given.model.name, "preset": recipe.name, "tensors": len(requests)}

    started = time.perf_counter()
    pieces = list(shards(open_data(ready.model, recipe.data, given.data)))
    samples = sum(len(piece.samples) for piece in pieces)
    found["driver: read and digest, ms/sample"] = _ms(started, samples)

    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import roundel.calibrate.collect"], check=True)
    found["worker: start Python, s"] = round(time.perf_counter() - started, 2)
    task = ShardTask(Portable.of(ready.model), requests, 0, pieces[0].samples[0], None, Budget())
    found["task, MB"] = _mb(task)
    started = time.perf_counter()
    opened = task.open(1)
    found["worker: open the task, s"] = round(time.perf_counter() - started, 2)
    started = time.perf_counter()
    results = [opened(piece) for piece in pieces]
    found["worker: one thread, ms/sample"] = _ms(started, samples)
    found["worker: peak memory, MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    found["shard sent, MB"] = _mb(pieces[0])
    found["results received, MB"] = _mb(results[0])

    store = open_store(given.data.parent / ".bench-checkpoint", resume=False)
    assert store is not None
    memory = store.memory("bench", {})
    started = time.perf_counter()
    for number, arrays in enumerate(results):
        memory.save(number, arrays)
    found["checkpoint: write, ms/shard"] = _ms(started, len(results))
    size = sum(path.stat().st_size for path in store.folder.iterdir())
    found["checkpoint, MB/shard"] = round(size / len(results) / 1e6, 3)
    for path in store.folder.iterdir():
        path.unlink()
    store.folder.rmdir()

    total = {name: OBSERVERS[kind]() for name, kind in requests.items()}
    started = time.perf_counter()
    for arrays in results:
        for number, (name, kind) in enumerate(requests.items()):
            prefix = f"stat.{number}."
            state = {k.removeprefix(prefix): a for k, a in arrays.items() if k.startswith(prefix)}
            total[name].merge(OBSERVERS[kind].from_state(state))
    found["driver: merge, ms/shard"] = _ms(started, len(results))
    found["samples in a shard"] = SIZE

    flat = [sample for piece in pieces for sample in piece.samples]
    for where in ("alone", "processes"):
        work = None if where == "alone" else Work(executor(where, workers=2))
        started = time.perf_counter()
        collect(ready.model, requests, flat, keep=0, work=work)
        found[f"whole pass, {where}, s"] = round(time.perf_counter() - started, 2)
    return found


def _ms(started: float, count: int) -> float:
    return round(1000 * (time.perf_counter() - started) / count, 2)


def _mb(thing: object) -> float:
    return round(len(pickle.dumps(thing, protocol=5)) / 1e6, 3)


if __name__ == "__main__":
    main()
