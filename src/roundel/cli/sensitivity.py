"""`roundel sensitivity`."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from roundel.cli.options import (
    DataChoice,
    Exclude,
    Include,
    Json,
    Model,
    Preset,
    RecipeFile,
    Set,
    WorkChoice,
    chosen_recipe,
    recipe_changes,
    takes_data,
    takes_work,
)

_EPILOG = """[bold]Examples[/]

roundel sensitivity model.onnx --data images/

roundel sensitivity model.onnx -p xint8 --data inputs.npz --worst 3 --json
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EPILOG, no_args_is_help=True)(takes_work(takes_data(sensitivity)))


def sensitivity(
    model: Model,
    data: DataChoice,
    work: WorkChoice,
    preset: Preset = None,
    recipe: RecipeFile = None,
    exclude: Exclude = None,
    include: Include = None,
    settings: Set = None,
    look: Annotated[int, typer.Option(help="Samples that each layer is measured with.")] = 8,
    worst: Annotated[int, typer.Option(help="Layers that get proposals, at most.")] = 5,
    everything: Annotated[bool, typer.Option("--all", help="List all layers, not only the worst.")] = False,
    as_json: Json = False,
) -> None:
    """Rank the layers by what quantizing them costs at the output, and say what would help."""
    from roundel.measure.sensitivity import sensitivity as run
    from roundel.report.console import ProgressListener, terminal
    from roundel.report.views import show_sensitivity
    from roundel.request import changed

    changes = changed(recipe_changes(settings, include, data=data.preprocessing), None, exclude or ())
    found = run(
        model,
        recipe=chosen_recipe(preset, recipe),
        data=data.required(),
        changes=changes,
        samples=look,
        worst=worst,
        **work,
        listener=None if as_json else ProgressListener(),
    )
    if as_json:
        sys.stdout.write(json.dumps(found.to_dict(), indent=1) + "\n")
    else:
        show_sensitivity(terminal(), found.to_dict(), everything=everything)
