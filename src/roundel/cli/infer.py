"""`roundel infer`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from roundel.cli.options import DataChoice, Json, takes_data

_EPILOG = """[bold]Examples[/]

roundel infer model.onnx --data images/ --out baseline_results/

roundel infer model.a8w8.onnx --data images/ --out quantized_results/

roundel evaluate --baseline baseline_results/ --quantized quantized_results/
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EPILOG, no_args_is_help=True)(takes_data(infer))


def infer(
    model: Annotated[Path, typer.Argument(help="An ONNX model, float or quantized.", show_default=False)],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder to write to; created if missing.", show_default=False)
    ],
    data: DataChoice,
    output: Annotated[
        list[str] | None, typer.Option("--output", help="Save only this output of the model.")
    ] = None,
    images: Annotated[
        bool, typer.Option("--images", help="Save PNG pictures (values 0..1) instead of .npy arrays.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Run a model over data and save each output, named after its input."""
    source, options = data.required(), data.options

    from roundel.measure.infer import infer as run
    from roundel.report.console import ProgressListener, terminal

    silent = quiet or as_json
    listener = None if silent else ProgressListener()
    done = run(model, source, out, options=options, outputs=output or (), images=images, listener=listener)
    if as_json:
        tree = {
            "model": done.model,
            "folder": str(done.folder),
            "outputs": done.outputs,
            "files": done.files,
            "seconds": done.seconds,
        }
        sys.stdout.write(json.dumps(tree, indent=1) + "\n")
    elif not quiet:
        terminal().print(
            f"{len(done.files)} files in {done.folder} ({', '.join(done.outputs)}), {done.seconds:.1f} s",
            highlight=False,
            markup=False,
        )
