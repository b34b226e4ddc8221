"""The whole check: gather the facts, run the rules, sort what they find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from roundel.errors import ModelError, RecipeError
from roundel.model.structure import ModelSource
from roundel.options import asked_recipe, fixing
from roundel.recipe.load import RecipeSource
from roundel.recipe.settings import Recipe
from roundel.rules import finished, graphs, operators, phoenix, written
from roundel.rules.facts import Facts, gather_facts
from roundel.rules.formats import format_of
from roundel.rules.types import CheckReport, Severity, rules_of
from roundel.targets.npu import Compiler, Device, Format, device_named

RULES = rules_of(finished, graphs, operators, phoenix, written)
_ORDER = {severity: index for index, severity in enumerate(Severity)}


def check(
    model: ModelSource,
    *,
    preset: str | None = None,
    recipe: RecipeSource | None = None,
    device: str = "stx",
    fix_inputs: Mapping[str, Any] | None = None,
) -> CheckReport:
    """Say what will run on the NPU and what stands in the way. Needs no NPU and no data.

    Args:
        model: an ONNX file, bytes, a ModelProto or an onnx-ir model; float, or quantized by any tool.
        preset: the format to judge; without it a8w8 for a float model, and what a quantized model shows.
        recipe: the same, as a file, a mapping or a Recipe.
        device: phx, hpt, stx, stx-halo or krk.
        fix_inputs: inputs of a float model that become constants, as `roundel.quantize` takes them.

    Raises:
        RoundelError: the model cannot be read, or there is no such preset or device.
    """
    facts = gather_facts(model, asked_recipe(preset, recipe), device_named(device), fixing({}, fix_inputs))
    findings = [found for rule in RULES for found in rule.findings(facts)]
    findings.sort(key=lambda finding: _ORDER[finding.severity])  # stable: by rule within a severity
    return CheckReport(
        model=facts.loaded.name,
        quantized=not facts.float_model,
        format=facts.format.value,
        device=facts.device.name,
        before=facts.before,
        after=facts.after,
        findings=tuple(findings),
        notes=_notes(facts),
        counts=facts.counts,
    )


def _notes(facts: Facts) -> tuple[str, ...]:
    measured = facts.device.compiler is Compiler.X1
    source = "measurements of one Phoenix NPU" if measured else "AMD's published logs"
    notes = [f"The split is predicted from {source} and AMD's operator table; no NPU was asked."]
    if facts.recognised is not None:
        known = facts.recognised
        notes.append(f"The model is quantized already: {known.format.value} ({known.reason}).")
    unknown = sum(1 for node in facts.before.nodes if node.macs is None)
    if unknown:
        notes.append(f"{unknown} layers have open shapes and are left out of the share of MACs.")
    return tuple(notes)


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
    phoenix.refuse_recipe(recipe, machine)
    return _where_open(recipe, _changes(kind, machine))


def cut_for_device(model: ModelSource, recipe: Recipe, device: str | None) -> Recipe:
    """The recipe, with the head cut off where that decides whether the first NPU takes anything."""
    machine = None if device is None else device_named(device)
    if machine is None or machine.compiler is not Compiler.X1 or "cut_head" in recipe.own.get("prepare", {}):
        return recipe
    cut = recipe.merged({"prepare": {"cut_head": True}})
    return recipe if gather_facts(model, recipe, machine).cut is None else cut


def refuse_silent(model: ModelSource, recipe: RecipeSource | None, device: str | None) -> None:
    """The gate for the first NPU: a file that it would get wrong without a message is no result.

    Raises:
        ModelError: the first thing of that kind.
    """
    machine = None if device is None else device_named(device)
    if machine is None or machine.compiler is not Compiler.X1:
        return
    facts = gather_facts(model, recipe, machine)
    for each in RULES:
        wrong = each.findings(facts) if each.id in phoenix.SILENT else ()
        for found in (found for found in wrong if found.severity is Severity.ERROR):
            raise ModelError(
                f"The NPU would not run this file rightly, nor say so: {found.rule} ({found.title}).",
                where=f"--device {machine.name}, {found.subject}",
                observed=found.message,
                expected=found.why,
                hint=found.fix,
            )


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
    report = check(model, recipe=recipe, device=device)
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
    if device.compiler is Compiler.X1 and kind is Format.XINT8:
        return {"npu": {"halves_up": True}}
    if device.compiler is not Compiler.X2 or kind not in (Format.XINT8, Format.A8W8):
        return {}
    changes = {"npu": {"clip_to_relu": True}}
    if kind is Format.XINT8:
        # HardSigmoid leaves the NPU there; a bound on the grid lets saturation do the work of ReLU6.
        changes["npu"]["sigmoid_to_hard_sigmoid"] = False
        changes["prepare"] = {"scale_clip_bounds": True}
    return changes
