"""`roundel deploy`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from roundel.cli.options import Json

_EPILOG = """[bold]Examples[/]

roundel deploy model.a8w8.onnx --device stx -o kit/

python kit/run.py --random --report
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EPILOG, no_args_is_help=True)(deploy)


def deploy(
    model: Annotated[
        Path, typer.Argument(help="The model to deploy: quantized or float.", show_default=False)
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The folder to write; may be new.", show_default=False)
    ],
    device: Annotated[str, typer.Option("--device", "-d", help="phx, hpt, stx, stx-halo or krk.")] = "stx",
    optimize_level: Annotated[int, typer.Option(help="Effort of the BF16 compiler, 1 to 3.")] = 2,
    as_json: Json = False,
) -> None:
    """Write a folder to run a model on a Ryzen AI NPU: model, provider options, run script, instructions."""
    import json

    from rich.console import Console

    from roundel.kit import write_kit
    from roundel.kit.console import show_kit

    kit = write_kit(model, output, device=device, optimize_level=optimize_level)
    if as_json:
        sys.stdout.write(json.dumps(kit.to_dict(), indent=1) + "\n")
    else:
        show_kit(Console(), kit)
