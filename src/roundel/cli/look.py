"""`roundel explain`, `inspect` and `presets`: what is there and what would be done, without data."""

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
    put_json,
    settings_tree,
)

EXPLAIN_EXAMPLES = """[bold]Examples[/]

roundel explain model.onnx --preset a16w8

roundel explain model.onnx --tensor /layer1/conv/Conv_output_0
"""
INSPECT_EXAMPLES = "[bold]Example[/]\n\nroundel inspect model.onnx --nodes"
PRESETS_EXAMPLES = (
    "[bold]Example[/]\n\nroundel presets a8w8 > my.yaml   (then edit it; pass --recipe my.yaml)"
)


def explain_command(
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
    from roundel.api.judging import explain
    from roundel.report.console import show_plan, terminal
    from roundel.report.record import plan_json

    plan = explain(
        model,
        preset=preset,
        recipe=recipe,
        tensor=tensor,
        exclude=exclude or (),
        include=include or (),
        changes=settings_tree(settings),
    )
    if as_json:
        sys.stdout.write(plan_json(plan, tensor))
    else:
        show_plan(terminal(), plan, tensor)


def inspect_command(
    model: Model,
    preset: Preset = None,
    nodes: Annotated[bool, typer.Option("--nodes", help="List every node.")] = False,
    as_json: Json = False,
) -> None:
    """Show a model's inputs, operators, types and sizes, and what a preset would quantize."""
    from roundel.inspection import inspect
    from roundel.report.console import show_inspection, terminal

    found = inspect(model, preset=preset)
    if as_json:
        put_json(found.to_dict(nodes=nodes))
    else:
        show_inspection(terminal(), found, nodes=nodes)


def presets_command(
    name: Annotated[str | None, typer.Argument(help="Print this preset as a recipe file.")] = None,
    as_json: Json = False,
) -> None:
    """List the presets, or print one as a recipe file."""
    from roundel.options import presets
    from roundel.recipe.load import dump_yaml

    recipes = presets(name)
    if name is not None:
        (recipe,) = recipes.values()
        if as_json:
            put_json(recipe.model_dump(mode="json"))
        else:
            sys.stdout.write(dump_yaml(recipe))
    elif as_json:
        put_json({known: recipe.title for known, recipe in recipes.items()})
    else:
        from roundel.report.console import show_presets, terminal

        show_presets(terminal(), recipes)
