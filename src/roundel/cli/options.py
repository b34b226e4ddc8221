"""Options that several commands share, and how they become recipe changes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from roundel.errors import RecipeError

Model = Annotated[Path, typer.Argument(help="The float ONNX model.", show_default=False)]
Preset = Annotated[str, typer.Option("--preset", "-p", help="Preset name; see `roundel presets`.")]
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
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


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
        tree.setdefault("selection", {})["include"] = include
    if subgraphs:
        tree.setdefault("selection", {})["exclude_subgraphs"] = [_subgraph(text) for text in subgraphs]
    given = {key: value for key, value in (data or {}).items() if value not in (None, False)}
    if given:
        tree["data"] = {**tree.get("data", {}), **given}
    return tree


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
        tree = tree.setdefault(part, {})
    try:
        tree[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError("The value of a --set option cannot be read.", where=setting) from error


def _subgraph(text: str) -> dict[str, list[str]]:
    start, arrow, end = text.partition("->")
    if not arrow:
        raise RecipeError("A subgraph needs both ends.", where=text, expected="'input,…->output,…'")
    return {
        "inputs": [w.strip() for w in start.split(",") if w.strip()],
        "outputs": [w.strip() for w in end.split(",") if w.strip()],
    }


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
