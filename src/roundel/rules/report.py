"""The whole check: gather the facts, run the rules, sort what they find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from roundel.errors import ModelError, RecipeError, RoundelError
from roundel.model.structure import ModelSource
from roundel.options import asked_recipe, fixing
from roundel.plain import counted
from roundel.recipe.load import RecipeSource, read_record
from roundel.recipe.settings import Recipe
from roundel.rules import finished as finished_rules
from roundel.rules import graphs, operators, phoenix, vaiml, written
from roundel.rules.facts import Facts, gather_facts
from roundel.rules.formats import format_of
from roundel.rules.latency import latency_of
from roundel.rules.types import CheckReport, Finding, Place, Prediction, Severity, rules_of
from roundel.targets.npu import USUAL_DEVICE, Compiler, Device, Format, device_named

RULES = rules_of(finished_rules, graphs, operators, phoenix, vaiml, written)
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
    return replace(_judged(facts), latency=latency_of(facts))


def _judged(facts: Facts) -> CheckReport:
    """What can be said without running the model."""
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
        counts=facts.counts,
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
    measured = facts.device.compiler is Compiler.X1
    source = "measurements of one Phoenix NPU" if measured else "AMD's published logs"
    notes = [f"The split is predicted from {source} and AMD's operator table; no NPU was asked."]
    if facts.device.like is not None:
        notes.append(
            f"{facts.device.name} is taken to behave as {facts.device.like}: nothing is known of it."
        )
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
        report = _judged(gather_facts(model, recipe, device_named(device)))
        return replace(report, findings=tuple(explained(report.findings, reasons or {})))
    except RoundelError as error:
        return " ".join(text for text in (error.what, error.hint) if text)


ENOUGH = 0.95  # share of the multiplications from which nobody is told how to get more
_WORTH = 0.01


def placed(
    checked: CheckReport | str, source: ModelSource, recipe: Recipe | None, device: str, made_for: str | None
) -> dict[str, Any]:
    """Where a finished model is expected to run, and what would bring more of it there.

    Args:
        checked: what `finished` said of it.
        source: the float model that it was made from.
        recipe: what it was made with.
        device: the device judged.
        made_for: the device that it was made for; None where nobody named one.
    """
    after = None
    if made_for != device and not isinstance(checked, str) and _short(checked):
        again = finished(source, recipe, device)
        after = None if isinstance(again, str) else again.after
    return placement(checked, device, after)


def placement(report: CheckReport | str, device: str, legalised: Prediction | None = None) -> dict[str, Any]:
    """Where a model is expected to run, for its record and for people.

    Args:
        report: of a float model, or of a finished one.
        device: the device judged.
        legalised: the split with --device; the report's own where not given.
    """
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
        "judged_as": device_named(report.device).like,
        "fix": _fix(report, legalised or report.after),
    }


def _short(report: CheckReport) -> bool:
    share = report.before.npu_share
    return share is not None and share < ENOUGH


def _fix(report: CheckReport, after: Prediction) -> dict[str, Any] | None:
    """What brings more of the work onto the NPU: the device's own steps, or the costliest rule's fix."""
    before = report.before
    if not _short(report):
        return None
    gained = after.npu_share or 0.0
    if gained > (before.npu_share or 0.0) + _WORTH:
        option = f"--device {report.device}"
        return {"option": option, "share": gained, "text": f"quantize with {option}: {gained:.1%}"}
    lost: Counter[str] = Counter()
    for node in before.nodes:
        if node.place is Place.CPU and node.rule is not None:
            lost[node.rule] += node.macs or 0
    fixes = {found.rule: found.fix for found in reversed(report.findings)}
    for rule, _ in lost.most_common():
        if rule in fixes:
            return {"option": None, "share": None, "text": f"{fixes[rule]} ({rule})"}
    return None


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
        f"{rule} ({count}x): {first[rule].message} Fix: {_remedy(first[rule], sizes)}"
        for rule, count in counts.items()
    )


def _remedy(found: Finding, sizes: Mapping[str, Sequence[int]]) -> str:
    size = sizes.get(str(found.subject)) if found.rule == "P02" else None
    if size is None:
        return found.fix
    return f"Fix it to the size of the data: -s 'prepare.fixed_shapes={{{found.subject}: {[1, *size[1:]]}}}'."


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
