"""Number formats by preset and by recipe."""

from __future__ import annotations

from roundel.errors import RecipeError
from roundel.recipe import Recipe
from roundel.recipe_file import RecipeSource, load_recipe, preset_names
from roundel.targets.devices import Format
from roundel.types import Scheme


def recipe_for(preset: RecipeSource) -> Recipe:
    """The recipe behind a preset; BF16 needs none of its own, since the compiler converts by itself."""
    bare = str(preset).strip().casefold() if isinstance(preset, str) else None
    if bare == Format.BF16.value and bare not in preset_names():
        return Recipe(name=bare, title="float32, which the BF16 compiler converts")
    return load_recipe(preset)


def format_of(recipe: Recipe) -> Format:
    """The format that a recipe writes.

    Raises:
        RecipeError: it writes none that the NPU takes.
    """
    kind = str(recipe.activations.type)
    if recipe.mode != "static":
        raise RecipeError(
            "Models of this mode run on the CPU; the NPU's compilers do not take them.",
            where=f"recipe {recipe.name}, mode {recipe.mode}",
            expected=", ".join(f.value for f in Format if f is not Format.FLOAT),
            hint="Choose --preset a8w8, or xint8 for Phoenix and Hawk Point.",
        )
    if recipe.name == Format.BF16.value or kind == "bfloat16":
        return Format.BF16
    if not isinstance(recipe.activations.scheme, Scheme):
        raise RecipeError(
            f"The NPU's compilers take no {kind} activations.",
            where=f"recipe {recipe.name}, activations.type",
            expected=", ".join(f.value for f in Format if f is not Format.FLOAT),
            hint="Choose --preset bf16: the same range as float32, in 16 bits.",
        )
    if kind.endswith("16"):
        return Format.A16W8
    return Format.XINT8 if recipe.activations.scale == "power_of_two" else Format.A8W8
