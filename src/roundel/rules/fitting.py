"""Fit a recipe to a device: switch on what is exact and helps placement, and say what is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from roundel.errors import RecipeError
from roundel.model.structure import ModelSource
from roundel.recipe.settings import Recipe
from roundel.rules.formats import format_of
from roundel.rules.report import check_model
from roundel.rules.types import Severity
from roundel.targets.npu import Compiler, Device, Format, device_named


def for_device(recipe: Recipe, device: str | None) -> Recipe:
    """The recipe with the device's exact fixes, where the user has not decided; unchanged without a device.

    Raises:
        RecipeError: there is no such device, or it does not take the recipe's format.
    """
    if device is None:
        return recipe
    machine, kind = device_named(device), format_of(recipe)
    if kind not in machine.formats:
        raise RecipeError(
            f"The device does not take {kind.value}.",
            where=f"--device {machine.name}, preset {recipe.name}",
            expected=", ".join(sorted(f.value for f in machine.formats)),
            hint="Choose one of these presets, or another device.",
        )
    return _where_open(recipe, _changes(kind, machine))


def for_effort(recipe: Recipe) -> Recipe:
    """With some effort, 8-bit power-of-two formats also get the exact rescaling of ReLU6 bounds."""
    if recipe.effort == "none" or recipe.activations.scale != "power_of_two":
        return recipe
    return _where_open(recipe, {"prepare": {"scale_clip_bounds": True}, "npu": {"clip_to_relu": True}})


def _where_open(recipe: Recipe, changes: Mapping[str, Mapping[str, bool]]) -> Recipe:
    """The changes to fields that only a preset has set: what a user sets stays."""
    own = recipe.own
    return recipe.merged(
        {
            section: {name: value for name, value in fields.items() if name not in own.get(section, {})}
            for section, fields in changes.items()
        }
    )


def remaining(model: ModelSource, recipe: Recipe, device: str | None) -> tuple[str, ...]:
    """Findings of the pre-flight check that the fixes do not cover, one line for each rule."""
    if device is None:
        return ()
    report = check_model(model, preset=recipe, device=device)
    left = [f for f in report.findings if not f.automatic and f.severity is not Severity.NOTE]
    counts = Counter(f.rule for f in left)
    first = {f.rule: f for f in reversed(left)}
    lines = [
        f"{rule} ({count}x): {first[rule].message} Fix: {first[rule].fix}" for rule, count in counts.items()
    ]
    now, then = report.after.islands, report.before.islands
    lines.append(f"predicted on {device}: {now} NPU island(s), {then} without the fixes")
    return tuple(lines)


def _changes(kind: Format, device: Device) -> dict[str, dict[str, bool]]:
    if device.compiler is not Compiler.X2 or kind not in (Format.XINT8, Format.A8W8):
        return {}
    changes = {"npu": {"clip_to_relu": True}}
    if kind is Format.XINT8:
        # HardSigmoid leaves the NPU there; a bound on the grid lets saturation do the work of ReLU6.
        changes["npu"]["sigmoid_to_hard_sigmoid"] = False
        changes["prepare"] = {"scale_clip_bounds": True}
    return changes
