"""Scores of folders and of models on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.markup import escape

from roundel.report.console import Tree, figure, grid, shortened, show_notes, size

_MOST_FILES = 20
_NAME_WIDTH = 36
_NAMES = {"cosine": "cosine", "l2": "L2", "psnr_db": "PSNR dB", "ssim": "SSIM"}


def show_folders(console: Console, tree: Tree) -> None:
    """Print what `FolderScores.to_dict` holds: the metrics, then the files, the worst of many only."""
    summary = grid("metric", ">mean", ">worst", "worst file")
    for name, metric in tree["metrics"].items():
        values = (figure(metric["mean"]), figure(metric["worst"]))
        summary.add_row(_NAMES[name], *values, escape(shortened(metric["worst_file"], _NAME_WIDTH)))
    console.print(summary)
    files = tree["files"]
    shown = files
    if len(files) > _MOST_FILES:
        shown = sorted(files, key=lambda file: float(file["cosine"]))[:_MOST_FILES]
    rest = f", the {len(shown)} worst by cosine (--csv FILE writes all)" if len(shown) < len(files) else ""
    headings = (f">{_NAMES[metric]}" for metric in tree["metrics"])
    table = grid("file", *headings, title=f"{len(files)} files{rest}")
    for file in shown:
        name = escape(shortened(file["name"], _NAME_WIDTH))
        table.add_row(name, *(figure(file[metric]) for metric in tree["metrics"]))
    console.print(table)


def show_models(console: Console, models: Sequence[Tree]) -> None:
    """Print what `ModelScore.to_dict` holds, side by side."""
    metrics = list(dict.fromkeys(name for model in models for name in model["metric"]))
    columns = {
        "top-1": [figure(m["top1"], ".2%") for m in models],
        "top-5": [figure(m["top5"], ".2%") for m in models],
        **{name: [figure(m["metric"].get(name)) for m in models] for name in metrics},
        "same top-1": [figure(m["agreement"], ".2%") for m in models],
        "SQNR dB": [figure(m["sqnr_db"]) for m in models],
        "size": [size(m["file_bytes"]) for m in models],
        "seconds": [f"{m['seconds']:.1f}" for m in models],
    }
    shown = {name: cells for name, cells in columns.items() if any(cell != "-" for cell in cells)}
    table = grid("model", *(f">{escape(name)}" for name in shown), title=f"{models[0]['rows']} rows")
    for index, model in enumerate(models):
        name = escape(shortened(model["model"], _NAME_WIDTH))
        table.add_row(name, *(cells[index] for cells in shown.values()))
    console.print(table)
    show_notes(
        console, dict.fromkeys(f"{model['model']}: {note}" for model in models for note in model["notes"])
    )


def show_findings(console: Console, tree: Tree) -> None:
    """Print what `DataReport.to_dict` holds."""
    console.print(f"{tree['samples']} samples", highlight=False)
    table = grid("input", ">mean", ">std", ">from", ">to")
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


Words = Callable[[float], str]

_COLOURS = {"chosen": "bold green", "meets": "green", "best": "bold yellow", "fails": "red"}


def show_ladder(console: Console, tree: Tree, metric: Words, drop: Words) -> None:
    """Print what `AutoResult.to_dict` holds.

    Args:
        console: where to.
        tree: the ladder.
        metric: a value of the metric for people.
        drop: a loss in the unit of the budget for people.
    """
    console.print(
        f"{escape(tree['metric'])}: {escape(tree['metric_words'])}; float {metric(tree['float'])};"
        f" judged on {escape(tree['judged_on'])}",
        highlight=False,
    )
    metric_column = f">{escape(tree['metric'][:12])}"
    table = grid("rung", metric_column, ">drop", ">SQNR dB", ">NPU", ">size", ">sec.", "verdict", gap=1)
    for step in tree["ladder"]:
        colour = _COLOURS.get(step["verdict"], "dim")
        table.add_row(*_cells(step, metric, drop), f"[{colour}]{step['verdict']}[/]")
    console.print(table)
    for step in tree["ladder"]:
        if step["reason"]:
            console.print(f"[dim]{escape(step['rung'])}:[/] {escape(step['reason'])}", highlight=False)
    _outcome(console, tree, metric, drop)
    show_notes(console, tree["notes"])


def step_line(step: Tree, metric: Words, drop: Words) -> str:
    """One rung in a line, for those who watch."""
    if step["metric"] is None:
        return f"{step['rung']}: {step['verdict']}, {step['reason']}"
    lost = "as good as float" if step["drop"] <= 0 else f"drop {drop(step['drop'])}"
    return f"{step['rung']}: {metric(step['metric'])}, {lost}, {step['verdict']}, {step['seconds']:.0f} s"


def show_study(console: Console, tree: Tree) -> None:
    """Print what `SearchResult.to_dict` holds: the best trials and how to use the first."""
    console.print(
        f"{tree['finished']} of {tree['trials']} trials, {escape(tree['metric'])} on"
        f" {escape(tree['judged_on'])}; study {escape(tree['study'])}",
        highlight=False,
    )
    objectives: Sequence[str] = tree["objectives"]
    table = grid(">trial", *(f">{escape(name)}" for name in objectives), "~values", gap=1)
    for trial in tree["best"]:
        values = ", ".join(f"{key}={value}" for key, value in trial["parameters"].items())
        numbers = (f"{value:.5g}" for value in trial["values"])
        table.add_row(str(trial["number"]), *numbers, escape(values))
    console.print(table)
    for trial in tree["refused"][:3]:
        console.print(f"[dim]trial {trial['number']} refused:[/] {escape(trial['reason'])}", highlight=False)
    if tree["options"]:
        console.print("\n[bold]the best one again[/]")
        console.print("  " + tree["options"], markup=False, highlight=False, soft_wrap=True)


def _cells(step: Tree, metric: Words, drop: Words) -> list[str]:
    share, noise = step["npu_share"], step["sqnr_db"]
    return [
        escape(step["rung"]),
        "-" if step["metric"] is None else metric(step["metric"]),
        "-" if step["drop"] is None else drop(float(step["drop"])),
        figure(noise, ".1f"),
        figure(share, ".0%"),
        size(step["file_bytes"]),
        f"{step['seconds']:.0f}",
    ]


def _outcome(console: Console, tree: Tree, metric: Words, drop: Words) -> None:
    chosen = next(step for step in tree["ladder"] if step["rung"] == tree["chosen"])
    where = f" in {tree['file']}" if tree["file"] else ""
    if tree["met"]:
        text = f"[bold green]met:[/] {escape(chosen['title'])}{escape(where)} stays within {tree['max_drop']}"
        console.print(text, highlight=False)
        return
    console.print(
        f"[bold red]not met:[/] no rung stays within {tree['max_drop']}; the best, {escape(chosen['title'])}"
        f" ({metric(chosen['metric'])}, drop {drop(chosen['drop'])}), was handed over{escape(where)}",
        highlight=False,
    )
