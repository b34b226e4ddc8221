"""`roundel check`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from roundel.cli.options import Json

_EPILOG = """[bold]Examples[/]

roundel check model.onnx --preset xint8 --device stx

roundel check model.int8.onnx --nodes   (a model that any tool has quantized)

Exit code: 0 when no finding is an error, 1 when one is.
"""

_Model = Annotated[Path, typer.Argument(help="An ONNX model, float or quantized.", show_default=False)]
_Preset = Annotated[
    str | None,
    typer.Option(
        "--preset",
        "-p",
        help="xint8, a8w8, a16w8 or bf16; else a8w8, or what a quantized model shows.",
        show_default=False,
    ),
]
_Device = Annotated[str, typer.Option("--device", "-d", help="phx, hpt, stx, stx-halo or krk.")]
_Nodes = Annotated[bool, typer.Option("--nodes", help="List the place of every node, and why.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EPILOG, no_args_is_help=True)(check)


def check(
    model: _Model,
    preset: _Preset = None,
    device: _Device = "stx",
    nodes: _Nodes = False,
    as_json: Json = False,
) -> None:
    """Say what will run on the NPU and what stands in the way. Needs no NPU and no data."""
    import json

    from roundel.report.console import terminal
    from roundel.report.views import show_check
    from roundel.rules import check_model

    report = check_model(model, preset=preset, device=device)
    tree = report.to_dict(nodes=nodes)
    if as_json:
        sys.stdout.write(json.dumps(tree, indent=1) + "\n")
    else:
        show_check(terminal(), tree)
    if not report.passed:
        raise typer.Exit(1)
