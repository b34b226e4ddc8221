"""What Roundel's functions take alike: a preset or a recipe, what stays float, how files become samples."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, get_type_hints

from roundel.errors import RecipeError
from roundel.recipe.load import RecipeSource, load_recipe, preset_names, unfolded
from roundel.recipe.settings import Data, Recipe

DEFAULT_PRESET = "a8w8"
Numbers = float | Sequence[float]
Size = int | Sequence[int]
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class DataWords(TypedDict, total=False):
    """How data become samples; the words mean the same everywhere (docs/recipes.md, section data).

    Attributes:
        samples: use at most this many.
        mean: of images: subtracted, one number or one for each channel, in units of the scaled image.
        std: of images: divides, likewise.
        scale: of images: unit (pixels / 255) or raw.
        resize: of images: the short side, or (height, width).
        crop: of images: centre crop, a side or (height, width).
        layout: of images: nchw or nhwc; read from the model's input when not given.
        bgr: of images: blue first.
        letterbox: of images: keep the aspect, with grey around to fill the model's size.
    """

    samples: int | None
    mean: Numbers | None
    std: Numbers | None
    scale: str | None
    resize: Size | None
    crop: Size | None
    layout: str | None
    bgr: bool
    letterbox: bool


def takes_data_words(function: FunctionT) -> FunctionT:
    """Show the words of the data as parameters, in `help` and to editors, and refuse any other word."""
    return _taking(function, get_type_hints(DataWords))


def takes_image_words(function: FunctionT) -> FunctionT:
    """The same without how many: the words for how one image becomes model input."""
    return _taking(function, {k: kind for k, kind in get_type_hints(DataWords).items() if k != "samples"})


def _taking(function: FunctionT, offered: Mapping[str, Any]) -> FunctionT:
    declared = inspect.signature(function)
    own = [p for p in declared.parameters.values() if p.kind is not p.VAR_KEYWORD]
    words = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=False if kind is bool else None, annotation=kind
        )
        for name, kind in offered.items()
    ]
    signature = declared.replace(parameters=[*own, *words])

    @functools.wraps(function)
    def run(*given: Any, **named: Any) -> Any:
        signature.bind(*given, **named)
        return function(*given, **named)

    run.__signature__ = signature  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]


def presets(name: str | None = None) -> dict[str, Recipe]:
    """The presets that ship, or only the one of this name, as recipes: `presets("a8w8")["a8w8"].title`.

    Raises:
        RecipeError: there is no such preset.
    """
    recipes = (load_recipe(known) for known in (preset_names() if name is None else (name,)))
    return {recipe.name: recipe for recipe in recipes}


def asked_recipe(preset: str | None, recipe: RecipeSource | None) -> RecipeSource | None:
    """The one source of the recipe, if any; two would leave the reader guessing which one won."""
    if preset is not None and recipe is not None:
        raise RecipeError(
            "Both --preset and --recipe were given.",
            observed=f"preset {preset}, recipe {recipe}"[:200],
            expected="one of them",
            hint=f"To build on the preset, write `extends: {preset}` into the recipe file.",
        )
    return recipe if recipe is not None else preset


def chosen_recipe(preset: str | None, recipe: RecipeSource | None) -> RecipeSource:
    """The same, and the default where nothing was said."""
    return asked_recipe(preset, recipe) or DEFAULT_PRESET


def recipe_changes(
    changes: Mapping[str, Any] | None,
    words: DataWords | None = None,
    exclude: Sequence[str] = (),
    include: Sequence[str] = (),
    exclude_subgraph: Sequence[str] = (),
    *,
    effort: str | None = None,
    goal: str | float | None = None,
    output: Mapping[str, bool] | None = None,
) -> dict[str, Any]:
    """The changes that a caller asks for in options of their own, with those that were given as changes.

    Args:
        changes: recipe values, nested or with dots.
        words: of the recipe's data section; None and False mean that nothing was said.
        exclude: what stays float, beside what the changes say.
        include: quantize only these.
        exclude_subgraph: what stays float, as 'input,…->output,…'.
        effort: the recipe's effort.
        goal: what each output should reach, in dB.
        output: of the recipe's output section, as `words`.
    """
    tree = unfolded(changes or {})
    if effort is not None:
        tree["effort"] = effort
    if goal is not None:
        _section(tree, "improve")["goal"] = parse_goal(goal)
    if exclude:
        selection = _section(tree, "selection")
        before = selection.get("exclude", ())
        selection["exclude"] = [*([before] if isinstance(before, str) else before), *exclude]
    if include:
        _section(tree, "selection")["include"] = list(include)
    if exclude_subgraph:
        _section(tree, "selection")["exclude_subgraphs"] = [_subgraph(text) for text in exclude_subgraph]
    for name, section in (("data", data_section(words or {})), ("output", _said(output or {}))):
        if section:
            _section(tree, name).update(section)
    return tree


def parse_goal(text: str | float) -> float:
    """A number of dB, with or without the unit.

    Raises:
        RecipeError: it is none.
    """
    word = str(text).strip()
    try:
        found = float(word.lower().removesuffix("db"))
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise RecipeError(
            "The goal is not a number of decibels.",
            where=f"goal {word}",
            expected="the SQNR that each output should reach, e.g. 20dB",
        )
    return found


def fixing(changes: Mapping[str, Any] | None, fix_inputs: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The changes, with inputs that become constants: numbers, arrays or lists by input name."""
    if not fix_inputs:
        return changes or {}
    import numpy as np

    plain = {name: np.asarray(value) for name, value in fix_inputs.items()}
    given = {name: array.ravel().tolist() if array.ndim else array.item() for name, array in plain.items()}
    tree = unfolded(changes or {})
    section = _section(tree, "prepare")
    section["fixed_inputs"] = {**section.get("fixed_inputs", {}), **given}
    return tree


def cutting(changes: Mapping[str, Any] | None, *, asked: bool) -> Mapping[str, Any]:
    """The changes, with the head cut off where that was asked for."""
    tree = unfolded(changes or {})
    if asked:
        _section(tree, "prepare")["cut_head"] = True
    return tree


def data_section(words: DataWords) -> dict[str, object]:
    """What was said, as a recipe's data section has it."""
    said = _said(words)
    return {k: [v] if k in ("mean", "std") and isinstance(v, int | float) else v for k, v in said.items()}


def data_settings(options: Data | None, words: DataWords) -> Data:
    """How files become samples, and how many: the options as changed by words.

    Raises:
        RecipeError: a value makes no sense.
    """
    given = data_section(words)
    known = options or Data()
    if not given:
        return known
    tree = {"data": {**known.model_dump(exclude_defaults=True), **given}}
    return load_recipe(DEFAULT_PRESET, tree).data


def no_data() -> RecipeError:
    """Where a command needs data and none was given."""
    return RecipeError(
        "No data was given.",
        expected="--data DIR",
        hint="Or --random N for a first look, without any meaning for accuracy.",
    )


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
