"""`roundel npu-report`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from roundel.cli.options import Json

_EPILOG = """[bold]Examples[/]

roundel npu-report kit/cache/*/vitisai_ep_report.json

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
        Path | None, typer.Option(help="The model that ran: shows where each operator type went.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show which operators ran on the NPU and which on the CPU, from the provider's report or console log."""
    import json

    from rich.console import Console

    from roundel.deploy import read_report
    from roundel.deploy.by_operator import model_operators, places
    from roundel.deploy.console import show_placement

    report = read_report(file)
    operators = None if model is None else model_operators(model)
    if not as_json:
        show_placement(Console(), report, operators)
        return
    tree = report.to_dict()
    if operators is not None:
        tree["model"] = {op: {"nodes": n, "ran_on": places(report, op)} for op, n in operators.items()}
    sys.stdout.write(json.dumps(tree, indent=1) + "\n")
