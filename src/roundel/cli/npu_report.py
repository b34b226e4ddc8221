"""`roundel npu-report`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from roundel.cli.options import Json
from roundel.errors import RecipeError

_EPILOG = """[bold]Examples[/]

roundel npu-report kit/cache/*/vitisai_ep_report.json

roundel npu-report session.log --model kit/model.onnx --device krk   (beside what `roundel check` predicts)

roundel npu-report session.log --json
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="npu-report", epilog=_EPILOG, no_args_is_help=True)(npu_report)


def npu_report(
    file: Annotated[
        Path, typer.Argument(help="vitisai_ep_report.json, or a log of the session.", show_default=False)
    ],
    model: Annotated[
        Path | None,
        typer.Option(help="The model that ran: shows where each operator type went, and what was predicted."),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option("--preset", "-p", help="Its format; else what it shows, or bf16.", show_default=False),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", "-d", help="Where it ran; else stx.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Show which operators ran on the NPU and which on the CPU, from the provider's report or console log."""
    import json

    from rich.console import Console

    from roundel.kit import compare_with_check, read_report
    from roundel.kit.console import show_placement, show_prediction
    from roundel.kit.placement import model_operators, places

    _refuse_without_model(model, preset, device)
    report = read_report(file)
    operators = None if model is None else model_operators(model)
    if not as_json:
        show_placement(Console(), report, operators)
    compared = None
    if model is not None:
        compared = compare_with_check(report, model, preset=preset, device=device or "stx")
    if not as_json:
        if compared is not None:
            show_prediction(Console(), compared)
        return
    tree = report.to_dict()
    if operators is not None:
        tree["model"] = {op: {"nodes": n, "ran_on": places(report, op)} for op, n in operators.items()}
    if compared is not None:
        tree["comparison"] = compared.to_dict()
    sys.stdout.write(json.dumps(tree, indent=1) + "\n")


def _refuse_without_model(model: Path | None, preset: str | None, device: str | None) -> None:
    if model is None and (preset is not None or device is not None):
        raise RecipeError(
            "There is no model to predict the placement of.",
            where="--device" if preset is None else "--preset",
            expected="--model MODEL beside it",
            hint="Name the model that ran, for example --model kit/model.onnx.",
        )
