"""Options that several commands share, and how they become recipe changes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundel.errors import RecipeError

if TYPE_CHECKING:
    from roundel.data import RandomSpec

Model = Annotated[Path, typer.Argument(help="The float ONNX model.", show_default=False)]
AnyModel = Annotated[
    Path,
    typer.Argument(
        help="The float model: an ONNX file; of PyTorch a .pt2 file, or package.module:factory.",
        show_default=False,
    ),
]
Preset = Annotated[
    str | None,
    typer.Option("--preset", "-p", help="Preset name, a8w8 if not given; see `roundel presets`."),
]
RecipeFile = Annotated[
    Path | None, typer.Option("--recipe", "-r", help="A recipe file (YAML or JSON) instead of a preset.")
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude", "-x", help="Keep in float: a node or tensor name, a glob, re:REGEX or op:TYPE."
    ),
]
Include = Annotated[
    list[str] | None, typer.Option("--include", help="Quantize only these (same words as --exclude).")
]
ExcludeSubgraph = Annotated[
    list[str] | None,
    typer.Option("--exclude-subgraph", help="Keep in float all between tensors: 'a,b->c,d'."),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", help="Change a recipe value, for example -s weights.per_channel=true."),
]
Report = Annotated[
    Path | None,
    typer.Option("--report", help="Also write one HTML page with all of it.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


DEFAULT_PRESET = "a8w8"


def chosen_recipe(preset: str | None, recipe: Path | None) -> str | Path:
    """The one source of the recipe; two would leave the reader guessing which one won."""
    if preset is not None and recipe is not None:
        raise RecipeError(
            "Both --preset and --recipe were given.",
            observed=f"--preset {preset} --recipe {recipe}",
            expected="one of them",
            hint=f"To build on the preset, write `extends: {preset}` into the recipe file.",
        )
    return recipe if recipe is not None else preset or DEFAULT_PRESET


def recipe_changes(
    settings: list[str] | None,
    include: list[str] | None = None,
    subgraphs: list[str] | None = None,
    data: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Nested recipe changes from the command line's words."""
    tree: dict[str, Any] = {}
    for setting in settings or ():
        _assign(tree, setting)
    if include:
        _section(tree, "selection", "--include")["include"] = include
    if subgraphs:
        borders = [_subgraph(text) for text in subgraphs]
        _section(tree, "selection", "--exclude-subgraph")["exclude_subgraphs"] = borders
    given = {key: value for key, value in (data or {}).items() if value not in (None, False)}
    if given:
        _section(tree, "data", "an image option").update(given)
    return tree


def _section(tree: dict[str, Any], key: str, setting: str) -> dict[str, Any]:
    inner = tree.setdefault(key, {})
    if not isinstance(inner, dict):
        raise RecipeError(
            f"'{key}' is a group of recipe values, and --set made it a single value.",
            where=setting,
            observed=f"{key}={inner}",
            hint=f"Name the value: --set {key}.NAME=VALUE.",
        )
    return inner


def _assign(tree: dict[str, Any], setting: str) -> None:
    import yaml

    key, equals, text = setting.partition("=")
    if not equals:
        raise RecipeError(
            "A --set option has no value.",
            where=setting,
            expected="KEY=VALUE",
            hint="For example weights.type=int8.",
        )
    *path, last = key.strip().split(".")
    for part in path:
        tree = _section(tree, part, setting)
    try:
        tree[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(
            "The value of a --set option cannot be read.",
            where=setting,
            observed=" ".join(str(error).split())[:200],
            expected="a YAML value: true, 8, int16, [1, 2]",
        ) from error


def _subgraph(text: str) -> dict[str, list[str]]:
    start, arrow, end = text.partition("->")
    if not arrow:
        raise RecipeError("A subgraph needs both ends.", where=text, expected="'input,…->output,…'")
    return {
        "inputs": [w.strip() for w in start.split(",") if w.strip()],
        "outputs": [w.strip() for w in end.split(",") if w.strip()],
    }


def random_data(count: int, shapes: list[str] | None) -> RandomSpec:
    """Random samples, with the shapes that the user gave."""
    from roundel.data import RandomSpec

    given = {}
    for text in shapes or ():
        name, equals, size = text.rpartition("=")
        if not equals or not all(part.isdigit() for part in size.split("x")):
            raise RecipeError("--shape takes a name and a size.", observed=text, expected="NAME=1x3x48x320")
        given[name] = tuple(int(part) for part in size.split("x"))
    return RandomSpec(count=count, shapes=given)


def numbers(text: str | None, option: str) -> list[float] | None:
    """'0.1,0.2' as numbers."""
    if text is None:
        return None
    try:
        return [float(part) for part in text.replace(" ", ",").split(",") if part]
    except ValueError as error:
        raise RecipeError(
            f"{option} takes numbers.", observed=text, expected="for example 0.485,0.456,0.406"
        ) from error


def pixels(text: str | None, option: str) -> int | list[int] | None:
    """'256' or '224x320' (height x width)."""
    if text is None:
        return None
    try:
        sides = [int(part) for part in text.lower().split("x")]
    except ValueError:
        sides = []
    if len(sides) not in (1, 2):
        raise RecipeError(
            f"{option} takes a size.", observed=text, expected="256 or 224x320 (height x width)"
        )
    return sides[0] if len(sides) == 1 else sides
