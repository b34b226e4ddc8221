"""What Roundel's functions take alike: a preset or a recipe, what stays float, how files become samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roundel.errors import RecipeError
from roundel.recipe.load import RecipeSource, load_recipe, preset_names, unfolded
from roundel.recipe.settings import Data, Recipe

DEFAULT_PRESET = "a8w8"
Numbers = float | Sequence[float]
Size = int | Sequence[int]


def presets(name: str | None = None) -> dict[str, Recipe]:
    """The presets that ship, or only the one of this name, as recipes: `presets("a8w8")["a8w8"].title`.

    Raises:
        RecipeError: there is no such preset.
    """
    recipes = (load_recipe(known) for known in (preset_names() if name is None else (name,)))
    return {recipe.name: recipe for recipe in recipes}


def chosen_recipe(preset: str | None, recipe: RecipeSource | None) -> RecipeSource | None:
    """The one source of the recipe, if any; two would leave the reader guessing which one won."""
    if preset is not None and recipe is not None:
        raise RecipeError(
            "Both --preset and --recipe were given.",
            observed=f"preset {preset}, recipe {recipe}"[:200],
            expected="one of them",
            hint=f"To build on the preset, write `extends: {preset}` into the recipe file.",
        )
    return recipe if recipe is not None else preset


def recipe_changes(
    changes: Mapping[str, Any] | None,
    include: Sequence[str] = (),
    exclude_subgraph: Sequence[str] = (),
    data: Mapping[str, object] | None = None,
    output: Mapping[str, bool] | None = None,
) -> dict[str, Any]:
    """The changes that a caller asks for in options of their own, with those that were given as changes.

    Args:
        changes: recipe values, nested or with dots.
        include: quantize only these.
        exclude_subgraph: what stays float, as 'input,…->output,…'.
        data: of the recipe's data section; None and False mean that nothing was said.
        output: of the recipe's output section, likewise.
    """
    tree = unfolded(changes or {})
    if include:
        _section(tree, "selection")["include"] = list(include)
    if exclude_subgraph:
        _section(tree, "selection")["exclude_subgraphs"] = [_subgraph(text) for text in exclude_subgraph]
    for name, section in (("data", data), ("output", output)):
        given = _said(section or {})
        if given:
            _section(tree, name).update(given)
    return tree


def image_words(
    mean: Numbers | None,
    std: Numbers | None,
    scale: str | None,
    resize: Size | None,
    crop: Size | None,
    layout: str | None,
    bgr: bool,
) -> dict[str, object]:
    """Preprocessing in the words of a recipe's data section."""
    words: dict[str, object] = {
        "mean": [mean] if isinstance(mean, int | float) else mean,
        "std": [std] if isinstance(std, int | float) else std,
    }
    return _said({**words, "scale": scale, "resize": resize, "crop": crop, "layout": layout, "bgr": bgr})


def data_settings(options: Data | None, words: Mapping[str, object], samples: int | None) -> Data | None:
    """How files become samples, and how many: the options as changed by words; None where nothing was said.

    Raises:
        RecipeError: a value makes no sense.
    """
    given = _said({**words, "samples": samples})
    if not given:
        return options
    known = {} if options is None else options.model_dump(exclude_defaults=True)
    return load_recipe(DEFAULT_PRESET, {"data": {**known, **given}}).data


def _said(words: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in words.items() if value is not None and value is not False}


def _section(tree: dict[str, Any], key: str) -> dict[str, Any]:
    inner = tree.get(key)
    if inner is not None and not isinstance(inner, Mapping):
        raise RecipeError(
            f"'{key}' is a group of recipe values, and the changes make it a single value.",
            observed=f"{key}={inner}",
            hint=f"Name the value: {key}.NAME=VALUE.",
        )
    section = tree[key] = dict(inner or {})
    return section


def _subgraph(text: str) -> dict[str, list[str]]:
    start, arrow, end = text.partition("->")
    if not arrow:
        raise RecipeError("A subgraph needs both ends.", where=text, expected="'input,…->output,…'")
    return {
        "inputs": [w.strip() for w in start.split(",") if w.strip()],
        "outputs": [w.strip() for w in end.split(",") if w.strip()],
    }
