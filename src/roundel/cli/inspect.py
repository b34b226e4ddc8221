"""`roundel inspect`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from roundel.cli.options import DEFAULT_PRESET, Json, Model, Preset


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="[bold]Example[/]\n\nroundel inspect model.onnx --nodes", no_args_is_help=True)(
        inspect
    )


def inspect(
    model: Model,
    preset: Preset = None,
    nodes: Annotated[bool, typer.Option("--nodes", help="List every node.")] = False,
    as_json: Json = False,
) -> None:
    """Show a model's inputs, operators, types and sizes, and what a preset would quantize."""
    import json

    from roundel.inspection import inspect_model
    from roundel.report.console import show_inspection, terminal

    found = inspect_model(model, preset or DEFAULT_PRESET)
    if as_json:
        sys.stdout.write(json.dumps(found.to_dict(nodes=nodes), indent=1) + "\n")
    else:
        show_inspection(terminal(), found, nodes=nodes)
