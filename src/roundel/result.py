"""What a run hands out: a file that is legal and near to the float model, and the record of its making."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from roundel.gate import OutputReport, advice, check_prepared, compare_outputs
from roundel.measure.lint import quantize_findings
from roundel.model import save_model
from roundel.model.files import file_sha256, model_sha256, self_contained, staged_or_temporary, write_text
from roundel.model.graph import fingerprint
from roundel.model.structure import ModelSource
from roundel.plain import Card
from roundel.plan import QuantPlan
from roundel.plan.float_parts import joined_outputs
from roundel.qdq import strip
from roundel.recipe.load import record_path
from roundel.report.record import Record, plan_counts, recipe_dict, run_card
from roundel.rules.report import remaining
from roundel.rules.written import check_file, check_written
from roundel.state import State
from roundel.torch import Exported, require_torch

_QUANTIZERS = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class QuantizeResult(Card):
    """A finished run.

    Attributes:
        ir: the quantized model in onnx-ir form.
        path: the written file, or None when no output was asked for.
        plan: what every tensor became, and why.
        record: the numbers, as they stand in the JSON file beside the model.
    """

    ir: ir.Model
    path: Path | None
    plan: QuantPlan
    record: Record

    @property
    def model(self) -> onnx.ModelProto:
        """The quantized model as a protobuf."""
        return ir.to_proto(self_contained(self.ir))

    def card(self) -> Mapping[str, object]:
        """What matters most of the record."""
        return run_card(self.record)

    def as_torch(self) -> Any:
        """The quantized model as a torch module for evaluation: tensors in, tensors out; needs torch."""
        require_torch("A module for evaluation needs")
        from roundel.torch.export import QuantizedModule

        return QuantizedModule(self.ir)

    def save(self, path: str | Path) -> Path:
        """Write the model and, beside it, its record; both appear whole or not at all."""
        target = Path(path)
        save_model(self.ir, target, external_data=self.record.recipe["output"]["external_data"])
        write_text(record_path(target), self.record.to_json())
        return target


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """What was asked for, and the float model that it starts from."""

    source: ModelSource
    exported: Exported | None
    target: Path | None
    device: str | None
    float: State


def gate(state: State, request: Asked, cleanup: ExitStack) -> QuantizeResult:
    """A file that is legal and near to the float model, with its record; or none.

    The file takes its place when the block of `cleanup` has ended well.
    """
    start, recipe, target = time.perf_counter(), state.recipe, request.target
    result = state.written
    assert result is not None
    if recipe.mode == "static" and state.plan.tensors:
        check_written(result, recipe, {n.name for n in state.plan.nodes.values() if n.quantized})
    # Saving takes the file's size again: what the graph was made from makes room.
    state = replace(state, params={}, float_scales={}, values={}, codes={}, packed={}, stats={})
    shown = strip(result) if recipe.output.strip_functions else result
    external = recipe.output.external_data
    file = cleanup.enter_context(
        staged_or_temporary(shown, target, external_data=external, reads=state.loaded.data_files)
    )
    # Operators without bodies run in no plain session: the same graph with them is the proof.
    proof = file if shown is result else cleanup.enter_context(staged_or_temporary(result, None))
    reports, doubt = _verified(state, request.source, proof)
    lint = quantize_findings(request.float.model, state.norms, (state.inputs, state.outputs), state.facts)
    random = state.facts.get("random")
    state = state.noted(
        *map(str, lint),
        *doubt,
        *(() if random else advice(reports, recipe)),
        *remaining(request.source, recipe, request.device),
    ).spent("gate", time.perf_counter() - start)
    record = _record(state, request, reports, file)
    if target is not None:
        write_text(record_path(target), record.to_json())
    return QuantizeResult(shown, target, state.plan, record)


def _verified(
    state: State, source: ModelSource, file: Path
) -> tuple[tuple[OutputReport, ...], tuple[str, ...]]:
    """Prove the written file legal and measure it."""
    doubt = None
    if state.inputs and not state.recipe.prepare.nchw_to_nhwc:
        doubt = check_prepared(source, state.inputs[0], state.outputs[0])
    session = check_file(file)
    count = state.recipe.verify.samples
    joints = joined_outputs(state.model.graph)
    reports = compare_outputs(session, state.inputs[:count], state.outputs[:count], source, joints)
    return reports, (doubt,) if doubt else ()


def _record(state: State, request: Asked, reports: tuple[OutputReport, ...], file: Path) -> Record:
    assert state.written is not None
    target = request.target
    size = file.stat().st_size if target else None
    return Record(
        quantized=bool(state.plan.tensors) or any(n.op_type in _QUANTIZERS for n in state.written.graph),
        model=_describe(state, request.exported),
        recipe=recipe_dict(state.recipe),
        data=state.facts,
        prepare=state.rewrites,
        counts=plan_counts(state.plan),
        float_nodes={n.name: n.reason for n in state.plan.nodes.values() if not n.quantized},
        improvements=state.steps,
        outputs=reports,
        seconds=state.seconds,
        notes=state.notes,
        file={
            "name": target.name if target else None,
            "bytes": size,
            **({"sha256": model_sha256(file)} if target else {}),
        },
    )


def _describe(state: State, exported: Exported | None) -> dict[str, Any]:
    loaded = state.loaded
    return {
        "name": exported.name if exported else loaded.name,
        "path": str(loaded.path) if loaded.path else None,
        "sha256": file_sha256(loaded.path) if loaded.path else None,
        "bytes": loaded.file_bytes,
        "opset": loaded.source_opset,
        "fingerprint": fingerprint(state.model),
    }
