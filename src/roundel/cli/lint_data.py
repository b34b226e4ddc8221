"""`roundel lint-data`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from roundel.cli.options import DataChoice, Json, Model, takes_data

_EPILOG = """[bold]Examples[/]

roundel lint-data model.onnx --data calib/ --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225

roundel lint-data model.onnx --data calib/ --against val/

Exit code: 0 when there is no warning, 1 when there is one.
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("lint-data", epilog=_EPILOG, no_args_is_help=True)(takes_data(lint_data))


def lint_data(
    model: Model,
    data: DataChoice,
    against: Annotated[
        Path | None,
        typer.Option(help="Other data, preprocessed alike, that should look the same (evaluation data)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Look for what would spoil a calibration: odd samples, wrong scaling or colours, too few samples."""
    source, options = data.required(), data.options

    from roundel.measure.lint import lint_data as run
    from roundel.report.console import ProgressListener, terminal
    from roundel.report.judged import show_findings

    listener = None if as_json else ProgressListener()
    report = run(model, source, options=options, against=against, listener=listener)
    if as_json:
        sys.stdout.write(json.dumps(report.to_dict(), indent=1) + "\n")
    else:
        show_findings(terminal(), report.to_dict())
    if not report.clean:
        raise typer.Exit(1)
