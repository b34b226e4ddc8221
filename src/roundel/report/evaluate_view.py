"""Scores of folders and of models on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from roundel.report.compare_view import shortened
from roundel.report.console import size

Tree = Mapping[str, Any]

_MOST_FILES = 20
_NAME_WIDTH = 36
_NAMES = {"cosine": "cosine", "l2": "L2", "psnr_db": "PSNR dB", "ssim": "SSIM"}


def show_folders(console: Console, tree: Tree) -> None:
    """Print what `FolderScores.to_dict` holds: the metrics, then the files, the worst of many only."""
    summary = Table(box=None, padding=(0, 1))
    for heading in ("metric", "mean", "worst", "worst file"):
        summary.add_column(heading, justify="right" if heading in ("mean", "worst") else "left", no_wrap=True)
    for name, metric in tree["metrics"].items():
        values = (_number(metric["mean"]), _number(metric["worst"]))
        summary.add_row(_NAMES[name], *values, escape(shortened(metric["worst_file"], _NAME_WIDTH)))
    console.print(summary)
    files = tree["files"]
    shown = files
    if len(files) > _MOST_FILES:
        shown = sorted(files, key=lambda file: float(file["cosine"]))[:_MOST_FILES]
    rest = f", the {len(shown)} worst by cosine (--csv FILE writes all)" if len(shown) < len(files) else ""
    table = Table(title=f"{len(files)} files{rest}", title_justify="left", box=None, padding=(0, 1))
    table.add_column("file", no_wrap=True)
    for metric in tree["metrics"]:
        table.add_column(_NAMES[metric], justify="right", no_wrap=True)
    for file in shown:
        name = escape(shortened(file["name"], _NAME_WIDTH))
        table.add_row(name, *(_number(file[metric]) for metric in tree["metrics"]))
    console.print(table)


def show_models(console: Console, models: Sequence[Tree]) -> None:
    """Print what `ModelScore.to_dict` holds, side by side."""
    metrics = list(dict.fromkeys(name for model in models for name in model["metric"]))
    columns = {
        "top-1": [_share(m["top1"]) for m in models],
        "top-5": [_share(m["top5"]) for m in models],
        **{name: [_number(m["metric"].get(name)) for m in models] for name in metrics},
        "same top-1": [_share(m["agreement"]) for m in models],
        "SQNR dB": [_number(m["sqnr_db"]) for m in models],
        "size": [size(m["file_bytes"]) for m in models],
        "seconds": [f"{m['seconds']:.1f}" for m in models],
    }
    shown = {name: cells for name, cells in columns.items() if any(cell != "-" for cell in cells)}
    table = Table(title=f"{models[0]['rows']} rows", title_justify="left", box=None, padding=(0, 1))
    table.add_column("model", no_wrap=True)
    for name in shown:
        table.add_column(escape(name), justify="right", no_wrap=True)
    for index, model in enumerate(models):
        name = escape(shortened(model["model"], _NAME_WIDTH))
        table.add_row(name, *(cells[index] for cells in shown.values()))
    console.print(table)
    for note in dict.fromkeys(f"{model['model']}: {note}" for model in models for note in model["notes"]):
        console.print(f"[yellow]note:[/] {escape(note)}", highlight=False)


def _number(value: Any) -> str:
    if value is None:
        return "-"
    number = float(value)
    return "exact" if number == float("inf") else f"{number:.5g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def show_findings(console: Console, tree: Tree) -> None:
    """Print what `DataReport.to_dict` holds."""
    console.print(f"{tree['samples']} samples", highlight=False)
    table = Table(box=None, padding=(0, 1))
    for heading in ("input", "mean", "std", "from", "to"):
        table.add_column(heading, justify="left" if heading == "input" else "right", no_wrap=True)
    for name, profile in tree["inputs"].items():
        mean, std = (" ".join(f"{value:.3g}" for value in profile[key]) for key in ("mean", "std"))
        table.add_row(
            escape(shortened(name, _NAME_WIDTH)), mean, std, f"{profile['low']:.3g}", f"{profile['high']:.3g}"
        )
    console.print(table)
    for finding in tree["findings"]:
        colour = "yellow" if finding["level"] == "warning" else "cyan"
        console.print(
            f"[{colour}]{finding['level']}[/] [bold]{finding['rule']}[/]: {escape(finding['message'])}",
            highlight=False,
        )
        if finding["hint"]:
            console.print(f"  {escape(finding['hint'])}", highlight=False)
    if not tree["findings"]:
        console.print("[green]nothing odd was found[/]")
