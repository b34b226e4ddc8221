"""`evaluate`: two folders of results, file by file."""

from __future__ import annotations

from roundel.measure.folders import evaluate_folders
from roundel.quark.tools.tool import Parameter, Tool

_NAMES = {"cosine": "cosine similarity", "l2": "L2 distance", "psnr_db": "PSNR in dB", "ssim": "SSIM"}


def _evaluate(baseline: str, quantized: str) -> str:
    scores = evaluate_folders(baseline, quantized)
    lines = [
        f"{_NAMES.get(name, name)}: mean {summary.mean:.6g}, worst {summary.worst:.6g} ({summary.worst_file})"
        for name, summary in scores.metrics.items()
    ]
    return "\n".join([f"{len(scores.files)} files", *lines])


EVALUATE = Tool(
    "evaluate",
    "Compares two folders of results (.npy, .png, .jpg): cosine, L2, PSNR, SSIM.",
    _evaluate,
    (
        Parameter("baseline", "results of the float model", ("--baseline_results_folder", "--baseline")),
        Parameter("quantized", "results of the other", ("--quantized_results_folder", "--quantized")),
    ),
    {"evaluate_folders": evaluate_folders},
)
