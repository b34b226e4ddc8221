"""`roundel auto`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from roundel.cli.options import (
    DataChoice,
    Exclude,
    ExcludeSubgraph,
    Include,
    Json,
    Model,
    Set,
    recipe_changes,
    takes_data,
)

NOT_MET = 9  # exit code: no rung meets the budget; the best one was written

_EPILOG = """[bold]Examples[/]

roundel auto model.onnx -o out.onnx --data calib/ --eval-data val/ --labels folders --max-drop '1 point'

roundel auto model.onnx -o out.onnx --data calib.npz --max-drop 1% --time 10m --device stx

roundel auto model.onnx -o out.onnx --data calib/ --metric mine.py:map50 --max-drop 0.005

Exit code 9: no rung meets the budget, and the best one was written all the same.
"""
_JUDGE = "Budget"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EPILOG, no_args_is_help=True)(takes_data(auto))


def auto(
    model: Model,
    data: DataChoice,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.", show_default=False)],
    max_drop: Annotated[
        str,
        typer.Option(
            help="'1%' of the float model's metric, '1 point' of a hundred, or '0.01' in its own units.",
            rich_help_panel=_JUDGE,
        ),
    ] = "1%",
    eval_data: Annotated[
        Path | None,
        typer.Option(
            help="Data to judge by; without it a quarter of --data is held out.",
            rich_help_panel=_JUDGE,
            show_default=False,
        ),
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(
            help="Of what judges: a file of class numbers, 'folders', or 're:REGEX'; see `roundel evaluate`.",
            rich_help_panel=_JUDGE,
            show_default=False,
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="top1, top5, agreement, fidelity, cosine, or your own module:function or file.py:function.",
            rich_help_panel=_JUDGE,
            show_default=False,
        ),
    ] = None,
    lower_is_better: Annotated[
        bool,
        typer.Option("--lower-is-better", help="Your own metric is an error.", rich_help_panel=_JUDGE),
    ] = False,
    time: Annotated[
        str | None,
        typer.Option(
            help="Most time for the whole walk: 10m, 90s, 1h30m.", rich_help_panel=_JUDGE, show_default=False
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="The NPU it is for: phx, hpt, stx, krk …", show_default=False)
    ] = None,
    rungs: Annotated[
        str | None,
        typer.Option(
            help="Only these, e.g. xint8,xint8-fast,a8w8,a16w8,mixed,bf16 (also xint8-adaround, -adaquant).",
            show_default=False,
        ),
    ] = None,
    exclude: Exclude = None,
    include: Include = None,
    exclude_subgraph: ExcludeSubgraph = None,
    settings: Set = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Find the fastest number format that keeps the model within an accuracy budget, and write that model."""
    from roundel.measure.yardstick import measure_of
    from roundel.report.console import ProgressListener, terminal
    from roundel.report.judged import show_ladder, step_line
    from roundel.trials.auto import auto as run
    from roundel.trials.budget import parse_drop
    from roundel.trials.rungs import RungStep

    silent = quiet or as_json
    drop, own = parse_drop(max_drop), measure_of(metric, lower=lower_is_better)
    words = own.text if own is not None else "{:.2%}".format

    def heard(step: RungStep) -> None:
        text = step_line(step.to_dict(), words, drop.words)
        terminal(stderr=True).print(text, markup=False, highlight=False)

    found = run(
        model,
        output,
        data=data.required(),
        eval_data=eval_data,
        labels=labels,
        metric=metric,
        lower_is_better=lower_is_better,
        max_drop=max_drop,
        time=time,
        device=device,
        rungs=None if rungs is None else [name for name in rungs.split(",") if name.strip()],
        exclude=exclude or (),
        changes=recipe_changes(settings, include, exclude_subgraph, data.preprocessing),
        listener=None if silent else ProgressListener(),
        on_step=None if silent else heard,
    )
    if as_json:
        sys.stdout.write(found.to_json())
    elif not quiet:
        show_ladder(terminal(), found.to_dict(), words, drop.words)
    if not found.met:
        raise typer.Exit(NOT_MET)
