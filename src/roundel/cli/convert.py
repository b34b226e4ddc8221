"""`roundel convert`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from roundel.cli.options import Json

_EPILOG = """[bold]Examples[/]

roundel convert model.onnx -o model.bf16.onnx --data inputs.npz   (and how far its outputs move)

roundel convert model.onnx -o small.onnx --form cast --half-weights

roundel convert model.bf16.onnx -o bare.onnx --strip-functions    (for AMD's tools)

roundel convert model.bf16.onnx -o model.float.onnx --to fp32
"""

_Model = Annotated[
    Path, typer.Argument(help="A float ONNX model, or one in bfloat16 or float16.", show_default=False)
]
_Output = Annotated[Path, typer.Option("--output", "-o", help="The file to write.", show_default=False)]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EPILOG, no_args_is_help=True)(convert)


def convert(
    model: _Model,
    output: _Output,
    to: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    form: Annotated[
        str, typer.Option(help="pair (AMD's operators), cast, or plain (only constants are rounded).")
    ] = "pair",
    half_weights: Annotated[
        bool, typer.Option("--half-weights", help="Constants in 16 bits: half the size, the same numbers.")
    ] = False,
    strip_functions: Annotated[
        bool, typer.Option("--strip-functions", help="Leave out the bodies of AMD's operators.")
    ] = False,
    external_data: Annotated[
        bool, typer.Option("--external-data", help="Weights in a file of their own.")
    ] = False,
    data: Annotated[
        Path | None, typer.Option(help="Samples to compare on: a folder, .npy or .npz.", show_default=False)
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Use at most this many.")] = None,
    as_json: Json = False,
) -> None:
    """Convert a whole model to bfloat16 or float16 and back, without calibration."""
    import json
    from dataclasses import asdict

    from roundel.conversion import convert as run
    from roundel.report.console import show_conversion, terminal

    result = run(
        model,
        output,
        to=to,  # type: ignore[arg-type]
        form=form,  # type: ignore[arg-type]
        half_weights=half_weights,
        strip_functions=strip_functions,
        external_data=external_data,
        data=data,
        samples=samples,
    )
    tree = {
        "file": {"name": output.name, "bytes": output.stat().st_size},
        "converted": dict(result.counts),
        "outputs": [asdict(report) for report in result.outputs],
        "notes": list(result.notes),
    }
    if as_json:
        sys.stdout.write(json.dumps(tree, indent=1) + "\n")
    else:
        show_conversion(terminal(), tree)
