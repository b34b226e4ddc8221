"""The whole check: gather the facts, run the rules, sort what they find."""

from __future__ import annotations

from roundel.model.structure import ModelSource
from roundel.recipe.load import RecipeSource
from roundel.rules import finished, graphs, operators, written
from roundel.rules.facts import Facts, gather_facts
from roundel.rules.types import CheckReport, Severity, rules_of
from roundel.targets.npu import device_named

RULES = rules_of(finished, graphs, operators, written)
_ORDER = {severity: index for index, severity in enumerate(Severity)}


def check_model(
    source: ModelSource, *, preset: RecipeSource | None = None, device: str = "stx"
) -> CheckReport:
    """Judge a model for an NPU, without an NPU and without data.

    Args:
        source: an ONNX file, bytes, a ModelProto or an onnx-ir model; float, or quantized by any tool.
        preset: xint8, a8w8, a16w8, bf16, or any recipe. None means a8w8 for a float model and the
            format that a quantized model shows.
        device: phx, hpt, stx, stx-halo or krk.

    Raises:
        ModelError: the model cannot be read.
        RecipeError: there is no such preset or device.
    """
    facts = gather_facts(source, preset, device_named(device))
    findings = [found for rule in RULES for found in rule.findings(facts)]
    findings.sort(key=lambda finding: _ORDER[finding.severity])  # stable: by rule within a severity
    return CheckReport(
        model=facts.loaded.path.name if facts.loaded.path else "in memory",
        quantized=not facts.float_model,
        format=facts.format.value,
        device=facts.device.name,
        before=facts.before,
        after=facts.after,
        findings=tuple(findings),
        notes=_notes(facts),
    )


def _notes(facts: Facts) -> tuple[str, ...]:
    notes = ["The split is predicted from AMD's published logs and operator table; no NPU was asked."]
    if facts.recognised is not None:
        known = facts.recognised
        notes.append(f"The model is quantized already: {known.format.value} ({known.reason}).")
    unknown = sum(1 for node in facts.before.nodes if node.macs is None)
    if unknown:
        notes.append(f"{unknown} layers have open shapes and are left out of the share of MACs.")
    return tuple(notes)
