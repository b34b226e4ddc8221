"""`roundel explain`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from roundel.cli.options import (
    Exclude,
    Include,
    Json,
    Model,
    Preset,
    RecipeFile,
    Set,
    chosen_recipe,
    recipe_changes,
)

_EPILOG = """[bold]Examples[/]

roundel explain model.onnx --preset a16w8

roundel explain model.onnx --tensor /layer1/conv/Conv_output_0
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EPILOG, no_args_is_help=True)(explain)


def explain(
    model: Model,
    preset: Preset = None,
    recipe: RecipeFile = None,
    tensor: Annotated[str | None, typer.Option(help="Only this tensor.")] = None,
    exclude: Exclude = None,
    include: Include = None,
    settings: Set = None,
    as_json: Json = False,
) -> None:
    """Show what every tensor would become, and why. Needs no data."""
    from roundel.errors import SelectionError, did_you_mean
    from roundel.plan import build_plan
    from roundel.recipe.load import load_recipe
    from roundel.report.console import show_plan, terminal
    from roundel.report.record import plan_json
    from roundel.request import changed
    from roundel.stages import prepare as load_prepared

    changes = changed(recipe_changes(settings, include), None, exclude or ())
    chosen = load_recipe(chosen_recipe(preset, recipe), changes)
    plan = build_plan(load_prepared(model, chosen).model, chosen)
    known = [*plan.tensors, *plan.kept_float]
    if tensor is not None and tensor not in known:
        raise SelectionError(f"The model has no float tensor '{tensor}'.", hint=did_you_mean(tensor, known))
    if as_json:
        sys.stdout.write(plan_json(plan, tensor))
    else:
        show_plan(terminal(), plan, tensor)
