"""The whole check: gather the facts, run the rules, sort what they find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from roundel.errors import RecipeError, RoundelError
from roundel.model.structure import ModelSource
from roundel.options import asked_recipe, fixing
from roundel.plain import counted
from roundel.recipe.load import RecipeSource, read_record
from roundel.recipe.settings import Recipe
from roundel.rules import finished as finished_rules
from roundel.rules import graphs, operators, written
from roundel.rules.facts import Facts, gather_facts
from roundel.rules.formats import format_of
from roundel.rules.types import CheckReport, Finding, Severity, rules_of
from roundel.targets.npu import USUAL_DEVICE, Compiler, Device, Format, device_named

RULES = rules_of(finished_rules, graphs, operators, written)
_ORDER = {severity: index for index, severity in enumerate(Severity)}


def check(
    model: ModelSource,
    *,
    preset: str | None = None,
    recipe: RecipeSource | None = None,
    device: str = USUAL_DEVICE,
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
    if not facts.float_model:
        record = read_record(facts.loaded.path) or {}
        findings = explained(findings, record.get("float_nodes", {}))
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
    )


def explained(findings: Sequence[Finding], reasons: Mapping[str, str]) -> list[Finding]:
    """The findings; nodes that the run itself has left in float share a note for each reason.

    Args:
        findings: about a finished model.
        reasons: of the run's record, by node: what was decided there is nothing left to do.
    """
    left, alike = list[Finding](), dict[str, list[Finding]]()
    for found in findings:
        known = reasons.get(str(found.subject)) if found.rule == "Q05" else None
        if known is None:
            left.append(found)
        else:
            alike.setdefault(known, []).append(found)
    for reason, members in alike.items():
        text = f"{counted(len(members), 'node')} left in float by the run: {reason}"
        left.append(replace(members[0], severity=Severity.NOTE, message=text, fix=_DECIDED))
    return left


_DECIDED = "Nothing, or cut them off the model where they come last: the CPU computes them."


def _notes(facts: Facts) -> tuple[str, ...]:
    notes = ["The split is predicted from AMD's published logs and operator table; no NPU was asked."]
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


def finished(
    model: ModelSource, recipe: Recipe | None, device: str, reasons: Mapping[str, str] | None = None
) -> CheckReport | str:
    """The check of a finished model; or why there is none, such as a format that no NPU takes.

    Args:
        model: quantized.
        recipe: that it was made by, where that is known.
        device: the NPU.
        reasons: nodes that the run left in float, with the reason, where no record beside the model says.
    """
    try:
        report = check(model, recipe=recipe, device=device)
        return replace(report, findings=tuple(explained(report.findings, reasons or {})))
    except RoundelError as error:
        return " ".join(text for text in (error.what, error.hint) if text)


def placement(report: CheckReport | str, device: str) -> dict[str, Any]:
    """Where a finished model is expected to run, for its record and for people."""
    if isinstance(report, str):
        return {"device": device, "refused": report}
    split = report.before
    errors = [f"{f.message} ({f.rule})" for f in report.findings if f.severity is Severity.ERROR]
    outside = Counter(node.op for node in split.nodes if node.island is None)
    return {
        "device": report.device,
        "format": report.format,
        **{key: value for key, value in split.to_dict(nodes=False).items() if key != "places"},
        "cpu": dict(outside.most_common()),
        "errors": list(dict.fromkeys(errors)),
    }


def remaining(report: CheckReport | str, sizes: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
    """What is left to do about a finished model, one line for each rule.

    Args:
        report: of its check.
        sizes: of the data, by input: what open shapes are to be fixed to.
    """
    if isinstance(report, str):
        return ()
    left = [f for f in report.findings if not f.automatic and f.severity is not Severity.NOTE]
    counts = Counter(f.rule for f in left)
    first = {f.rule: f for f in reversed(left)}
    return tuple(
        f"{rule} ({count}x): {first[rule].message} Fix: {_fix(first[rule], sizes)}"
        for rule, count in counts.items()
    )


def _fix(found: Finding, sizes: Mapping[str, Sequence[int]]) -> str:
    size = sizes.get(str(found.subject)) if found.rule == "P02" else None
    if size is None:
        return found.fix
    return f"Fix it to the size of the data: -s 'prepare.fixed_shapes={{{found.subject}: {[1, *size[1:]]}}}'."


def _changes(kind: Format, device: Device) -> dict[str, dict[str, bool]]:
    if device.compiler is not Compiler.X2 or kind not in (Format.XINT8, Format.A8W8):
        return {}
    changes = {"npu": {"clip_to_relu": True}}
    if kind is Format.XINT8:
        # HardSigmoid leaves the NPU there; a bound on the grid lets saturation do the work of ReLU6.
        changes["npu"]["sigmoid_to_hard_sigmoid"] = False
        changes["prepare"] = {"scale_clip_bounds": True}
    return changes
