"""NNCF's post-training quantizer on an ONNX model (run in the ``nncf`` environment).

Presets: ``performance`` (symmetric activations) and ``mixed`` (asymmetric), both int8. Option:
``fast_bias_correction`` (bool; NNCF's own default is on).
"""

from __future__ import annotations

from protocol import Job, Quantize, Sample, parse_job, run_job

PACKAGES = ("nncf", "onnxruntime", "onnx", "numpy")


def load(job: Job) -> Quantize:
    """Imports NNCF and returns the call that quantizes."""
    import nncf  # type: ignore[import-not-found]
    import onnx

    job.check_options(("fast_bias_correction",))
    preset = nncf.QuantizationPreset(job.preset)
    fast = bool(job.options.get("fast_bias_correction", True))

    def quantize(samples: list[Sample]) -> None:
        model = onnx.load(str(job.model))
        data = nncf.Dataset(samples)
        done = nncf.quantize(model, data, preset=preset, subset_size=len(samples), fast_bias_correction=fast)
        onnx.save(done, str(job.output))

    return quantize


def main() -> None:
    """Runs the job given on the command line."""
    run_job(parse_job(), load, PACKAGES)


if __name__ == "__main__":
    main()
