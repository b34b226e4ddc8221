"""Writes a report as JSON and as a Markdown table. Standard library only."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from records import ModelResult, Recorded, Report, Row

HEADER = (
    "contender",
    "top-1 %",
    "top-5 %",
    "as float %",
    "SQNR dB",
    "size MB",
    "time s",
    "min s",
    "x forward",
    "min x",
    "import s",
    "peak MB",
)


def write(report: Report, base: Path) -> None:
    """Writes ``<base>.json`` and ``<base>.md``."""
    base.parent.mkdir(parents=True, exist_ok=True)
    base.with_name(base.name + ".json").write_text(json.dumps(as_json(report), indent=1) + "\n")
    base.with_name(base.name + ".md").write_text(as_markdown(report))


def as_json(report: Report) -> dict[str, Any]:
    """The report with the figures that are computed from its values."""
    data = asdict(report)
    for model, stored in zip(report.models, data["models"], strict=True):
        stored["forward_median_s"] = model.forward_median_s
        for row, kept in zip(model.rows, stored["rows"], strict=True):
            kept |= {
                "median_s": row.median_s,
                "min_s": row.min_s,
                "over_forward": _over(row, model),
                "min_over_min_forward": _min_over(row, model),
                "repeatable": row.repeatable,
            }
    return data


def as_markdown(report: Report) -> str:
    """The report for reading."""
    lines = ["# Benchmark", "", ", ".join(f"{key}: {value}" for key, value in report.machine.items()) + "  "]
    lines.append(
        f"repository: {report.revision}; repeats: {report.repeat} (alternating), time is the median  "
    )
    for peer, versions in report.versions.items():
        lines.append(
            f"{peer}: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + "  "
        )
    for model in report.models:
        lines += ["", *_model_lines(model)]
    return "\n".join(lines) + "\n"


def _model_lines(model: ModelResult) -> list[str]:
    score = model.float_score
    lines = [
        f"## {model.title} (`{model.model}`)",
        "",
        f"{model.calibration_images} calibration images, {score.images} evaluated; one float pass over the "
        f"calibration images {model.forward_median_s:.2f} s (min {min(model.forward_s):.2f}).",
        "",
        "| " + " | ".join(HEADER) + " |",
        "|" + "---|" * len(HEADER),
        _line("float", score.top1, score.top5, None, None, score.size_bytes / 1e6),
    ]
    lines += [_row_line(row, model) for row in model.rows]
    lines += [_recorded_line(known) for known in model.recorded]
    notes = [f"- `{row.contender}`: {error}" for row in model.rows for error in row.errors]
    notes += [
        f"- `{row.contender}`: its repeats wrote different files"
        for row in model.rows
        if row.repeatable is False
    ]
    return [*lines, "", *notes] if notes else lines


def _row_line(row: Row, model: ModelResult) -> str:
    name = f"{row.contender} (failed)" if row.errors else row.contender
    score = row.score
    quality: list[float | None] = [None] * 5
    if score is not None:
        quality = [score.top1, score.top5, score.agreement, score.sqnr_db, score.size_bytes / 1e6]
    imports = min((run.import_s for run in row.runs), default=None)
    peak = max((run.peak_rss_mb for run in row.runs), default=None)
    return _line(
        name, *quality, row.median_s, row.min_s, _over(row, model), _min_over(row, model), imports, peak
    )


def _recorded_line(known: Recorded) -> str:
    ratio = known.wall_s / known.forward_s
    quality = (known.top1, known.top5, known.agreement, known.sqnr_db, None)
    times = (known.wall_s, known.wall_s, ratio, ratio, None, known.peak_rss_mb)
    return _line(f"{known.contender} (recorded)", *quality, *times)


def _over(row: Row, model: ModelResult) -> float | None:
    return row.median_s / model.forward_median_s if row.median_s is not None else None


def _min_over(row: Row, model: ModelResult) -> float | None:
    return row.min_s / min(model.forward_s) if row.min_s is not None else None


def _line(name: str, *figures: float | None) -> str:
    digits = (1, 1, 1, 1, 2, 2, 2, 1, 1, 1, 0)
    padded = [*figures, *[None] * (len(digits) - len(figures))]
    cells = ["" if value is None else f"{value:.{d}f}" for value, d in zip(padded, digits, strict=True)]
    return "| " + " | ".join([name, *cells]) + " |"
