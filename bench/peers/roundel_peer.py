"""Roundel itself (run in the ``roundel`` environment).

The preset is a preset's name or a recipe file, whose path is relative to ``bench/``. Options are keyword
arguments of ``roundel.quantize``, for instance ``{"samples": 50}``; Roundel refuses those it does not know.
"""

from __future__ import annotations

from pathlib import Path

from protocol import Job, Quantize, Sample, parse_job, run_job

BENCH_DIR = Path(__file__).resolve().parent.parent
PACKAGES = ("roundel", "onnxruntime", "onnx", "onnx-ir", "numpy", "torch")


def load(job: Job) -> Quantize:
    """Imports Roundel and returns the call that quantizes."""
    import roundel  # type: ignore[import-not-found, unused-ignore]

    # Roundel looks its names up on first use: without this line its imports would fall inside the clock.
    call = roundel.quantize
    file = BENCH_DIR / job.preset
    recipe: str | Path = file if file.suffix == ".yaml" else job.preset

    def quantize(samples: list[Sample]) -> None:
        call(str(job.model), str(job.output), recipe=recipe, data=samples, **job.options)

    return quantize


def main() -> None:
    """Runs the job given on the command line."""
    run_job(parse_job(), load, PACKAGES)


if __name__ == "__main__":
    main()
