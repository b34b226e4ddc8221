"""Number formats: by name, by recipe, and as a finished model shows them."""

from __future__ import annotations

from dataclasses import dataclass

from roundel.check.stored import BFLOAT16, StoredTensors
from roundel.errors import RecipeError, did_you_mean
from roundel.recipe import Recipe
from roundel.recipe_file import RecipeSource, load_recipe, preset_names
from roundel.targets.devices import DEVICES, Device, Format

_MOSTLY = 0.9  # share of power-of-two scales from which a file was meant as XINT8


@dataclass(frozen=True, slots=True)
class Recognised:
    """The format of a finished model, and what shows it."""

    format: Format
    reason: str


def device_named(name: str) -> Device:
    """The device, or an error that names those there are."""
    device = DEVICES.get(name.strip().casefold())
    if device is None:
        raise RecipeError(
            f"There is no device '{name}'.",
            where="--device",
            expected=", ".join(f"{d.name} ({d.processors})" for d in DEVICES.values()),
            hint=did_you_mean(name, DEVICES),
        )
    return device


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
    if recipe.mode == "dynamic":
        raise RecipeError(
            "Dynamic quantization runs on the CPU only.",
            where=f"recipe {recipe.name}",
            expected=", ".join(f.value for f in Format),
            hint="Choose --preset a8w8, or xint8 for Phoenix and Hawk Point.",
        )
    if recipe.name == Format.BF16.value or "float" in kind:
        return Format.BF16
    if kind.endswith("16"):
        return Format.A16W8
    return Format.XINT8 if recipe.activations.scale == "power_of_two" else Format.A8W8


def recognise(stored: StoredTensors) -> Recognised:
    """The format that a finished model was meant to be in."""
    moving = [tensor for tensor in stored.tensors.values() if not tensor.constant]
    judged = moving or list(stored.tensors.values())
    brain = sum(1 for tensor in judged if tensor.dtype == BFLOAT16)
    if brain:
        return Recognised(Format.BF16, f"{brain} tensors pass through bfloat16")
    wide = sum(1 for tensor in judged if tensor.dtype in ("int16", "uint16"))
    if wide:
        return Recognised(Format.A16W8, f"{wide} of {len(judged)} activations are 16 bit")
    powers = sum(1 for tensor in judged if tensor.power_of_two)
    if judged and powers >= _MOSTLY * len(judged):
        return Recognised(Format.XINT8, f"{powers} of {len(judged)} activation scales are powers of two")
    return Recognised(Format.A8W8, f"8 bit, {len(judged) - powers} activation scales of any size")
