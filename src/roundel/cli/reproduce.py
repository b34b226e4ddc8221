"""`roundel reproduce`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from roundel.cli.options import Json

_EPILOG = """[bold]Examples[/]

roundel reproduce model.a8w8.json

roundel reproduce model.a8w8.json --model other/place/model.onnx --data other/place/calib -o again.onnx
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EPILOG, no_args_is_help=True)(reproduce)


def reproduce(
    record: Annotated[
        Path, typer.Argument(help="The JSON file beside a quantized model.", show_default=False)
    ],
    model: Annotated[Path | None, typer.Option(help="The float model, where it has moved.")] = None,
    data: Annotated[Path | None, typer.Option(help="The calibration data, where they have moved.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Keep the new model here.")] = None,
    as_json: Json = False,
) -> None:
    """Repeat a run from its record and say whether the result has the same bytes; exit code 1 if not."""
    import json

    from roundel.report.console import ProgressListener, terminal
    from roundel.reproduction import reproduce as run

    told = None if as_json else ProgressListener()
    found = run(record, model=model, data=data, output=output, listener=told)
    if as_json:
        sys.stdout.write(json.dumps(found.to_dict(), indent=1) + "\n")
    else:
        console = terminal()
        verdict = "the same, byte for byte" if found.matches else "not the same"
        console.print(f"quantized model: {verdict}", highlight=False)
        for difference in found.differences:
            console.print(f"  {difference}", markup=False, highlight=False, soft_wrap=True)
    if not found.matches:
        raise typer.Exit(1)
