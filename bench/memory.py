"""Whether peak memory grows with the number of samples: `python bench/memory.py MODEL.onnx CALIB.npz`.

The images of CALIB.npz (array x) are repeated with noise. Each run is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import describe, revision

RESULTS = Path(__file__).parent / "results"


def measured(model: Path, data: Path, options: dict[str, Any]) -> dict[str, Any]:
    """One run; its peak, its time and its forecast."""
    with tempfile.TemporaryDirectory() as folder:
        child = Path(__file__).with_name("scale_child.py")
        words = [str(model), str(data), str(Path(folder) / "out.onnx"), json.dumps(options)]
        done = subprocess.run(
            [sys.executable, str(child), *words], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
    return {**options, **json.loads(done.stdout.splitlines()[-1])}


def write_results(out: Path, lines: list[str], rows: list[dict[str, Any]]) -> None:
    """The page, with the machine below it, and the raw figures beside it."""
    machine = describe()
    page = [*lines, "", ", ".join(f"{key} {value}" for key, value in machine.items()) + f"; {revision()}."]
    out.with_suffix(".md").write_text("\n".join(page) + "\n")
    out.with_suffix(".json").write_text(json.dumps({"runs": rows, "machine": machine}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--recipe", default="xint8")
    parser.add_argument("--samples", default="100,1000")
    parser.add_argument("--efforts", default="none,fast")
    parser.add_argument("--out", type=Path, default=RESULTS / "memory")
    given = parser.parse_args()
    rows = []
    for effort in given.efforts.split(","):
        for count in map(int, given.samples.split(",")):
            rows.append(
                measured(
                    given.model, given.data, {"recipe": given.recipe, "effort": effort, "samples": count}
                )
            )
            print(rows[-1], flush=True)
    lines = [
        f"# Peak memory of {given.recipe} on {given.model.stem} by number of samples",
        "",
        "The largest resident size of the process, imports and the images (60 MB) included. The forecast was",
        "made before the run. `python bench/memory.py MODEL.onnx CALIB.npz` repeats it.",
        "",
        "| effort | samples | peak MB | forecast MB | CPU s | forecast of wall s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['effort']} | {row['samples']} | {row['peak_mb']:.0f} | {row['forecast_mb']:.0f}"
            f" | {row['cpu_seconds']:.0f} | {row['forecast_seconds']:.0f} |"
        )
    write_results(given.out, lines, rows)


if __name__ == "__main__":
    main()
