"""`roundel demo`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from roundel.cli.options import Json

_EPILOG = """[bold]Examples[/]

roundel demo

roundel demo -p a8w8 -p a16w8 -o models/
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EPILOG)(demo)


def demo(
    preset: Annotated[list[str] | None, typer.Option("--preset", "-p", help="Only these presets.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Keep the models in this folder.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Quantize the embedded example with every preset and compare the results."""
    import json
    from dataclasses import asdict

    from roundel.demo import run_demo
    from roundel.report.console import ProgressListener, show_demo, terminal

    listener = None if as_json else ProgressListener()
    rows = run_demo(preset, output, listener)
    if as_json:
        sys.stdout.write(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    else:
        show_demo(terminal(), rows)
