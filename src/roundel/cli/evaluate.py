"""`roundel evaluate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from roundel.cli.options import DataChoice, Json, WorkChoice, takes_data, takes_work
from roundel.errors import RecipeError

_EPILOG = """[bold]Examples[/]

roundel evaluate --baseline baseline_results/ --quantized quantized_results/ --csv scores.csv

roundel evaluate model.onnx model.a8w8.onnx --data val/ --labels folders --mean 0.5 --std 0.5

roundel evaluate model.onnx model.xint8.onnx --data x.npz --labels x.npz --metric mine.py:f1
"""
_FOLDERS, _MODELS = "Two folders of results", "Models on data"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EPILOG, no_args_is_help=True)(takes_work(takes_data(evaluate)))


def evaluate(
    data: DataChoice,
    work: WorkChoice,
    what: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="MODEL",
            help="Models, the float one first. Or two folders of results.",
            show_default=False,
        ),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            "--baseline",
            "--baseline_results_folder",
            "--baseline-results-folder",
            help="Results of the float model: .jpg, .png or .npy.",
            rich_help_panel=_FOLDERS,
        ),
    ] = None,
    quantized: Annotated[
        Path | None,
        typer.Option(
            "--quantized",
            "--quantized_results_folder",
            "--quantized-results-folder",
            help="Results of the quantized model, under the same names.",
            rich_help_panel=_FOLDERS,
        ),
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(
            help="File of class numbers (.npy, .npz, .json, .csv, .txt), 'folders', or 're:REGEX'.",
            rich_help_panel=_MODELS,
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="Your own: module:function or file.py:function, called with (outputs, labels).",
            rich_help_panel=_MODELS,
        ),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", help="Also write the scores of each file (or model) there.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Judge results: two folders file by file, or models side by side on data."""
    given = what or []
    if not baseline and not quantized and len(given) == 2 and all(path.is_dir() for path in given):
        baseline, quantized, given = given[0], given[1], []
    if baseline is None and quantized is None:
        _models(given, data, work, (labels, metric), csv, as_json=as_json)
    elif baseline is None or quantized is None or given:
        raise RecipeError(
            "Two folders are compared, or models are run; this is something in between.",
            observed=" ".join(map(str, given)) or "one folder",
            expected="--baseline DIR --quantized DIR, or MODEL … --data DIR",
        )
    elif any(work.values()):
        raise RecipeError(
            "Folders of results are compared at once, in this process.",
            expected="no --executor, --checkpoint or --resume",
        )
    else:
        _folders(baseline, quantized, csv, as_json=as_json)


def _folders(baseline: Path, quantized: Path, csv: Path | None, *, as_json: bool) -> None:
    from roundel.measure.folders import evaluate_folders
    from roundel.model.files import check_writable, write_text
    from roundel.report.console import ProgressListener, terminal
    from roundel.report.judged import show_folders

    if csv is not None:
        check_writable(csv)
    scores = evaluate_folders(baseline, quantized, listener=None if as_json else ProgressListener())
    if csv is not None:
        write_text(csv, scores.to_csv())
    if as_json:
        sys.stdout.write(json.dumps(scores.to_dict(), indent=1) + "\n")
    else:
        show_folders(terminal(), scores.to_dict())


def _models(
    models: list[Path],
    data: DataChoice,
    work: WorkChoice,
    judges: tuple[str | None, str | None],
    csv: Path | None,
    *,
    as_json: bool,
) -> None:
    if not models:
        raise RecipeError(
            "There is nothing to evaluate.", expected="--baseline DIR --quantized DIR, or MODEL … --data DIR"
        )
    labels, metric = judges
    source, options = data.required(), data.options

    from roundel.measure.evaluate import evaluate_models, scores_csv
    from roundel.model.files import check_writable, write_text
    from roundel.report.console import ProgressListener, terminal
    from roundel.report.judged import show_models

    if csv is not None:
        check_writable(csv)
    listener = None if as_json else ProgressListener()
    scores = evaluate_models(
        models, source, labels=labels, metric=metric, options=options, **work, listener=listener
    )
    tree = [score.to_dict() for score in scores]
    if csv is not None:
        write_text(csv, scores_csv(scores))
    if as_json:
        sys.stdout.write(json.dumps({"models": tree}, indent=1) + "\n")
    else:
        show_models(terminal(), tree)
