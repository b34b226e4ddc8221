"""`roundel presets`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from roundel.cli.options import Json


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog="[bold]Example[/]\n\nroundel presets a8w8 > my.yaml   (then edit it; pass --recipe my.yaml)"
    )(presets)


def presets(
    name: Annotated[str | None, typer.Argument(help="Print this preset as a recipe file.")] = None,
    as_json: Json = False,
) -> None:
    """List the presets, or print one as a recipe file."""
    import json

    from roundel.recipe.load import dump_yaml, load_recipe, preset_names

    if name is not None:
        recipe = load_recipe(name)
        text = json.dumps(recipe.model_dump(mode="json"), indent=1) + "\n" if as_json else dump_yaml(recipe)
        sys.stdout.write(text)
        return
    titles = {known: load_recipe(known).title for known in preset_names()}
    if as_json:
        sys.stdout.write(json.dumps(titles, indent=1) + "\n")
        return
    from rich.table import Table

    from roundel.report.console import terminal

    table = Table(box=None)
    table.add_column("preset", no_wrap=True)
    table.add_column("what it is")
    for known, title in titles.items():
        table.add_row(known, title)
    terminal().print(table)
