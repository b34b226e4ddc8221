"""One measured quantization in a process of its own; prints one line of JSON."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx

import roundel


class Repeated:
    """The rows of an array, again and again; from the second time on with noise."""

    def __init__(self, name: str, rows: Any, count: int) -> None:
        self._name, self._rows, self._count = name, rows, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rng = np.random.default_rng(0)
        for index in range(self._count):
            row = self._rows[index % len(self._rows)][None]
            noise = 0 if index < len(self._rows) else rng.normal(0, 0.01, row.shape)
            yield {self._name: np.asarray(row + noise, np.float32)}


def main() -> None:
    """`scale_child.py MODEL DATA.npz OUT '{"recipe": …, "samples": …, "effort": …, "max_memory": …}'`."""
    model, data, out, options = *sys.argv[1:4], json.loads(sys.argv[4])
    name = onnx.load(model, load_external_data=False).graph.input[0].name
    rows = np.load(data)["x"]
    samples = Repeated(name, rows, options.pop("samples"))
    expected: list[roundel.Forecast] = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, cpu = time.perf_counter(), time.process_time()
    done = roundel.quantize(model, out, data=samples, on_forecast=expected.append, **options)
    used = {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "steps": done.record.seconds,
        "before_mb": before * 1024 / 1e6,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
        "forecast": str(expected[0]),
        "forecast_mb": expected[0].memory / 1e6,
        "forecast_seconds": expected[0].seconds,
    }
    print(json.dumps(used))


if __name__ == "__main__":
    main()
