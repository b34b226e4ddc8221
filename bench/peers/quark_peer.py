"""AMD Quark, through its classic ONNX API (run in the ``quark`` environment).

Presets are the names of ``get_default_config`` (XINT8, A8W8, A16W8, BF16, S8S8_AAWS, U8S8_AAWS, ...).
Options: ``include_cle`` (bool; Quark's own default is on) and ``extra_options`` (merged over the preset's).
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator

from protocol import Job, Quantize, Sample, parse_job, run_job

PACKAGES = ("amd-quark", "onnxruntime", "onnx", "numpy", "torch", "onnxslim")


def load(job: Job) -> Quantize:
    """Imports Quark and returns the call that quantizes."""
    from quark.onnx import CalibrationDataReader, ModelQuantizer  # type: ignore[import-not-found]
    from quark.onnx.quantization.config import Config, get_default_config  # type: ignore[import-not-found]

    job.check_options(("include_cle", "extra_options"))
    settings = get_default_config(job.preset)
    if "include_cle" in job.options:
        settings.include_cle = bool(job.options["include_cle"])
    settings.extra_options.update(job.options.get("extra_options", {}))

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        """Hands out the samples one by one, then None."""

        def __init__(self, samples: list[Sample]) -> None:
            self._left: Iterator[Sample] = iter(samples)

        def get_next(self) -> Sample | None:
            return next(self._left, None)

    def quantize(samples: list[Sample]) -> None:
        quantizer = ModelQuantizer(Config(global_quant_config=settings))
        quantizer.quantize_model(str(job.model), str(job.output), Reader(samples))

    return quantize


def main() -> None:
    """Runs the job given on the command line."""
    job = parse_job()
    # Quark appends quantized_info.csv to the working directory and keeps activations in files under it.
    with tempfile.TemporaryDirectory(prefix="roundel-bench-") as folder, contextlib.chdir(folder):
        run_job(job, load, PACKAGES)


if __name__ == "__main__":
    main()
