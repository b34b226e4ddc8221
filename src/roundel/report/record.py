"""The record of a run: everything needed to understand and repeat it, as JSON."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from roundel.gate import OutputReport
from roundel.plain import counted, to_plain
from roundel.plan.types import QuantPlan, Role
from roundel.recipe.load import RECORD_VERSION
from roundel.report.verdict import Verdict
from roundel.state import StepReport
from roundel.version import VERSION

if TYPE_CHECKING:
    from roundel.measure.types import ModelScore


@dataclass(frozen=True, slots=True)
class Record:
    """One run.

    Args:
        quantized: False when nothing could be quantized and the float model was passed through.
        model: where the model came from: name, bytes, opset, fingerprint.
        recipe: the whole recipe.
        data: what the samples were.
        prepare: rewrites by pass.
        counts: quantized and float nodes by operator, tensors by role.
        float_nodes: nodes left in float, with the reason.
        improvements: what each step beyond calibration did to the held-out error, layer by layer.
        outputs: closeness of each graph output to the float model.
        held_out: SQNR in dB of each output on samples that no step has learned from, where that was doubtful.
        seconds: wall time by step.
        notes: whatever a careful reader wants to know.
        file: the written file: name, bytes.
        asked: what later commands need not ask again: device; eval_data, labels and task, where accuracy was
            measured.
        scores: the float and the quantized model on that data.
        npu: where the file is expected to run.
        verdict: is it accurate, will it run on the NPU, what next.
    """

    quantized: bool
    model: Mapping[str, Any]
    recipe: Mapping[str, Any]
    data: Mapping[str, Any]
    prepare: Mapping[str, int]
    counts: Mapping[str, Any]
    float_nodes: Mapping[str, str]
    improvements: tuple[StepReport, ...]
    outputs: tuple[OutputReport, ...]
    held_out: Mapping[str, float]
    seconds: Mapping[str, float]
    notes: tuple[str, ...]
    file: Mapping[str, Any]
    asked: Mapping[str, Any]
    scores: tuple[ModelScore, ...]
    npu: Mapping[str, Any]
    verdict: Verdict

    @property
    def goal(self) -> float:
        """What each output should reach, in dB."""
        return float(self.recipe["improve"]["goal"])

    @property
    def worst(self) -> tuple[str, float] | None:
        """The output furthest from the float model, and its SQNR in dB; None where none was measured."""
        known = [*self.held_out.items(), *((out.name, out.sqnr_db) for out in self.outputs)]
        return min(known, key=lambda pair: pair[1], default=None)

    @property
    def reached(self) -> bool:
        """Whether each output reaches the goal."""
        return self.worst is None or self.worst[1] >= self.goal

    def to_dict(self) -> dict[str, Any]:
        """Plain values; infinite numbers become strings, since JSON has none."""
        return {"record_version": RECORD_VERSION, "versions": versions(), **to_plain(self)}

    def to_json(self) -> str:
        """Indented JSON text."""
        return json.dumps(self.to_dict(), indent=1) + "\n"


def run_card(record: Record) -> dict[str, object]:
    """What matters most of a run, for whoever looks at its result."""
    quantized, left = (sum(record.counts[kind].values()) for kind in ("quantized_nodes", "float_nodes"))
    rows = record.verdict.rows()
    missed = "" if record.reached else f"; below the goal of {record.goal:g} dB"
    return {
        "model": f"{record.model.get('name')} -> {record.file.get('name') or 'in memory'}",
        "recipe": f"{record.recipe.get('name')}, {quantized} of {quantized + left} nodes quantized,"
        f" {sum(record.seconds.values()):.1f} s, {counted(len(record.notes), 'note')} in .record.notes",
        **rows,
        "accurate?": rows["accurate?"] + missed,
    }


def plan_counts(plan: QuantPlan) -> dict[str, Any]:
    """How much of the model is quantized."""
    nodes = plan.nodes.values()
    roles = Counter(t.role for t in plan.tensors.values())
    return {
        "quantized_nodes": dict(Counter(n.op for n in nodes if n.quantized)),
        "float_nodes": dict(Counter(n.op for n in nodes if not n.quantized)),
        "tensors": {role.value: roles.get(role, 0) for role in Role},
    }


def plan_json(plan: QuantPlan, tensor: str | None = None) -> str:
    """The plan as JSON text; without its nodes where it is that of one tensor."""
    tensors = [
        {
            "name": t.name,
            "role": t.role.value,
            "stored_as": str(t.scheme),
            "range": str(t.source),
            "decided_by": t.decided_by,
            "reason": t.reason,
        }
        for t in plan.tensors.values()
    ]
    nodes = {"nodes": [asdict(node) for node in plan.nodes.values()]} if tensor is None else {}
    return json.dumps({"tensors": tensors, "float": dict(plan.kept_float), **nodes}, indent=1) + "\n"


def versions() -> dict[str, str]:
    """What computed the numbers."""
    names = ("numpy", "onnx", "onnx-ir", "onnxruntime")
    return {
        "roundel": VERSION,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in names},
    }
