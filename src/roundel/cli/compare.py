"""`roundel compare`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from roundel.cli.options import DataChoice, Json, Report, WorkChoice, takes_data, takes_work

_EPILOG = """[bold]Examples[/]

roundel compare model.onnx model.a8w8.onnx --data images/ --samples 32

roundel compare model.onnx other-tools.onnx --data inputs.npz --all --csv layers.csv

roundel compare model.onnx model.a8w8.onnx --data images/ --report report.html
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EPILOG, no_args_is_help=True)(takes_work(takes_data(compare)))


def compare(
    float_model: Annotated[Path, typer.Argument(help="The float ONNX model.", show_default=False)],
    quantized_model: Annotated[
        Path, typer.Argument(help="Its quantized form, from any tool.", show_default=False)
    ],
    data: DataChoice,
    work: WorkChoice,
    everything: Annotated[
        bool, typer.Option("--all", help="All tensors, in order of execution, not only the worst.")
    ] = False,
    weights: Annotated[bool, typer.Option("--weights", help="Also list the weights.")] = False,
    csv: Annotated[Path | None, typer.Option("--csv", help="Also write all tensors there.")] = None,
    report: Report = None,
    device: Annotated[
        str | None,
        typer.Option(help="The NPU whose split the report predicts; else stx.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare a float model and its quantized form tensor by tensor: which layer hurts, and why."""
    source, options = data.required(), data.options

    from roundel.errors import RecipeError
    from roundel.measure.compare import compare as run
    from roundel.measure.types import to_csv
    from roundel.model.files import check_writable, write_text
    from roundel.report.console import ProgressListener, terminal
    from roundel.report.views import show_comparison

    if device is not None and report is None:
        raise RecipeError(
            "--device is for the report.", where=f"--device {device}", expected="--report FILE, too"
        )
    if csv is not None:
        check_writable(csv)
    listener = None if as_json else ProgressListener()
    if report is None:
        result = run(float_model, quantized_model, source, options=options, **work, listener=listener)
    else:
        from roundel.reporting import DEVICE, write_report

        result = write_report(
            report,
            float_model,
            quantized_model,
            source,
            options=options,
            device=device or DEVICE,
            **work,
            listener=listener,
        )
    if csv is not None:
        write_text(csv, to_csv(result))
    if as_json:
        sys.stdout.write(json.dumps(result.to_dict(), indent=1) + "\n")
    else:
        show_comparison(terminal(), result.to_dict(), everything=everything, weights=weights)
        if report is not None:
            terminal().print(f"report: {report}", markup=False, highlight=False, soft_wrap=True)
