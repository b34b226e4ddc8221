"""The two ends of a run: what it is asked for, checked before any work; and what it hands out.

That is a file that is legal and near to the float model, and the record of its making.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from roundel.errors import DependencyError, RecipeError
from roundel.gate import OutputReport, advice, check_prepared, compare_outputs
from roundel.heads import joined, tail_outputs
from roundel.measure.evaluate import check_judging, evaluate_models
from roundel.measure.lint import quantize_findings
from roundel.measure.types import ModelScore
from roundel.model import ModelSource, save_model
from roundel.model.files import (
    file_sha256,
    model_sha256,
    self_contained,
    staged,
    staged_or_temporary,
    write_text,
)
from roundel.model.graph import fingerprint
from roundel.model.session import Lanes, runtime_has_cuda
from roundel.plain import Card, to_plain
from roundel.plan import QuantPlan
from roundel.plan.float_parts import joined_outputs
from roundel.qdq import strip
from roundel.recipe.load import record_path, tail_path
from roundel.recipe.settings import Data, Recipe
from roundel.report.record import Record, plan_counts, run_card
from roundel.report.verdict import Known, verdict
from roundel.rules.report import finished, placed, refuse_silent, remaining
from roundel.rules.written import check_file, check_written
from roundel.state import State
from roundel.targets.npu import USUAL_DEVICE
from roundel.torch import Exported, is_torch_source, opened, require_torch
from roundel.types import Listener

_Model = ir.Model  # a field of the result hides the module's name
_QUANTIZERS = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class QuantizeResult(Card):
    """A finished run.

    Attributes:
        ir: the quantized model in onnx-ir form.
        path: the written file, or None when no output was asked for.
        plan: what every tensor became, and why.
        record: the numbers, as they stand in the JSON file beside the model.
        tail: in float: the rest of a model whose head was cut off; it reads the model's outputs.
    """

    ir: ir.Model
    path: Path | None
    plan: QuantPlan
    record: Record
    tail: _Model | None = None

    @property
    def whole(self) -> _Model:
        """The quantized model; with its tail, where its head was cut off."""
        return self.ir if self.tail is None else joined(self.ir, self.tail)

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

        return QuantizedModule(self.whole)

    def save(self, path: str | Path) -> Path:
        """Write the model and, beside it, its record and tail; each appears whole or not at all."""
        target = Path(path)
        apart = self.record.recipe["output"]["external_data"]
        save_model(self.ir, target, external_data=apart)
        facts = _facts_of(target)
        if self.tail is not None:
            save_model(self.tail, tail_path(target), external_data=apart)
            facts["tail"] = _facts_of(tail_path(target))
        write_text(record_path(target), replace(self.record, file=facts).to_json())
        return target


def _facts_of(file: Path, place: Path | None = None) -> dict[str, object]:
    """What a record says of a model's file, which may still lie elsewhere than at its place."""
    return {"name": (place or file).name, "bytes": file.stat().st_size, "sha256": model_sha256(file)}


def as_onnx(
    model: Any, example_inputs: object, dynamic_batch: bool, dynamic_shapes: Any
) -> tuple[ModelSource, Exported | None]:
    """The model as ONNX, and where it came from if that was PyTorch."""
    if is_torch_source(model):
        model = opened(model, example_inputs, dynamic_batch=dynamic_batch, dynamic_shapes=dynamic_shapes)
    elif example_inputs is not None or dynamic_batch or dynamic_shapes is not None:
        raise RecipeError(
            "Example inputs and dynamic shapes are for models in PyTorch.",
            observed=f"a model of type {type(model).__name__}",
            hint="Leave them out: an ONNX model says its shapes itself.",
        )
    return (model.model, model) if isinstance(model, Exported) else (model, None)


CHOICES = ("auto", "cpu", "cuda")
_GPU = 0


@dataclass(frozen=True, slots=True)
class Execution:
    """The choice.

    Attributes:
        recipe: with the devices of fine-tuning filled in.
        calibration: the number of the GPU that runs the model over the data, or None for the CPU.
        notes: what was chosen, for the record; nothing where nothing was asked.
    """

    recipe: Recipe
    calibration: int | None = None
    notes: tuple[str, ...] = ()


def choose_execution(asked: str | None, recipe: Recipe) -> Execution:
    """Where calibration and fine-tuning run.

    Args:
        asked: auto takes a GPU where there is one, cuda insists on it, cpu needs none; None leaves the choice
            to the recipe: calibration on the CPU, fine-tuning where improve.finetune says.
        recipe: says whether there is anything to tune.

    Raises:
        RecipeError: no such choice.
        DependencyError: cuda was asked for, and a package for it is missing.
    """
    if asked is None:
        return Execution(recipe)
    if asked not in CHOICES:
        what = "Unknown place to run."
        raise RecipeError.unknown(what, asked, CHOICES, where="--device-exec", observed=asked)
    tunes = recipe.finetuning != "none"
    none = None if runtime_has_cuda() else "this ONNX Runtime has no CUDA provider: onnxruntime-gpu has"
    lacks = {"calibration": none} | ({"fine-tuning": _torch_lacks()} if tunes else {})
    if asked == "cuda":
        _insist(lacks)
    places = {part: "cpu" if asked == "cpu" or missing else "cuda" for part, missing in lacks.items()}
    if tunes:
        devices = {"optim_device": places["fine-tuning"], "infer_device": places["calibration"]}
        recipe = recipe.merged({"improve": {"finetune": devices}})
    reasons = {part: f" ({lacks[part]})" if asked == "auto" and lacks[part] else "" for part in places}
    said = ", ".join(f"{part} on {place}{reasons[part]}" for part, place in places.items())
    number = _GPU if places["calibration"] == "cuda" else None
    return Execution(recipe, number, (f"--device-exec {asked}: {said}",))


def _insist(lacks: dict[str, str | None]) -> None:
    hints: dict[str, str] = {
        "calibration": "pip uninstall onnxruntime, then pip install 'onnxruntime-gpu[cuda,cudnn]'",
        "fine-tuning": "install a build of torch with CUDA, and check its driver: torch.cuda.is_available()",
    }
    for part, missing in lacks.items():
        if missing is not None:
            raise DependencyError(
                f"CUDA was asked for, and {part} cannot use it.",
                where="--device-exec cuda",
                observed=missing,
                hint=f"{hints[part]}; or --device-exec auto, which takes what is there and says so.",
            )


def _torch_lacks() -> str | None:
    """Why torch cannot use a GPU here, or None."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


@dataclass(frozen=True, slots=True, eq=False)
class Judging:
    """Data that tell how accurate both models are.

    Attributes:
        data: whatever `roundel.quantize` takes, prepared as the calibration data are.
        labels: as `roundel.evaluate` takes them; None counts the rows that keep their answer.
        task: classification or detection.
    """

    data: object
    labels: object
    task: str

    @staticmethod
    def of(data: object, labels: object, task: str) -> Judging | None:
        """What was asked for, or nothing.

        Raises:
            RecipeError: labels came without data, or there is no such task.
        """
        check_judging(data, labels, task)
        return None if data is None else Judging(data, labels, task)

    def scores(
        self, models: Sequence[ModelSource], options: Data, listener: Listener | None
    ) -> tuple[ModelScore, ...]:
        """The models on these data, the float one first."""
        return evaluate_models(
            models, self.data, labels=self.labels, task=self.task, options=options, listener=listener
        )

    def told(self) -> dict[str, object]:
        """For the record: paths and words; what was in memory has none."""
        given = {"eval_data": self.data, "labels": self.labels}
        return {**{key: _words(value) for key, value in given.items()}, "task": self.task}


def _words(value: object) -> str | None:
    """A path is kept whole, since the record may be read elsewhere."""
    if not isinstance(value, str | Path):
        return None
    return str(Path(value).absolute()) if Path(value).exists() else str(value)


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """What was asked for, and the float model that it starts from."""

    source: ModelSource
    exported: Exported | None
    target: Path | None
    device: str | None
    float: State
    judging: Judging | None = None
    told: Listener | None = None


def gate(state: State, request: Asked, cleanup: ExitStack) -> QuantizeResult:
    """A file that is legal and near to the float model, with its record; or none.

    The file takes its place when the block of `cleanup` has ended well.
    """
    start, recipe, target = time.perf_counter(), state.recipe, request.target
    result = state.written
    assert result is not None
    if recipe.mode == "static" and state.plan.tensors:
        check_written(result, recipe, {n.name for n in state.plan.nodes.values() if n.quantized})
        refuse_silent(result, recipe, request.device)
    # Saving takes the file's size again: what the graph was made from makes room.
    state = replace(state, params={}, float_scales={}, values={}, codes={}, packed={}, stats={})
    shown = strip(result) if recipe.output.strip_functions else result
    external, reads = recipe.output.external_data, state.loaded.data_files
    written = staged_or_temporary(shown, target, external_data=external, reads=reads)
    file = cleanup.enter_context(written)
    # Operators without bodies run in no plain session: the same graph with them is the proof.
    proof = file if shown is result else cleanup.enter_context(staged_or_temporary(result, None))
    reports, doubt = _verified(state, request.source, proof)
    lint = quantize_findings(request.float.model, state.norms, (state.inputs, state.outputs), state.facts)
    missed = min(state.held.values(), default=recipe.improve.goal) < recipe.improve.goal  # with a note
    more = () if state.facts.get("random") or missed else advice(reports, recipe)
    device = request.device or USUAL_DEVICE
    reasons = {n.name: n.reason for n in state.plan.nodes.values() if not n.quantized}
    checked = finished(proof, recipe, device, reasons)
    sizes = {name: array.shape for name, array in next(iter(state.inputs), {}).items()}
    left = () if request.device is None else remaining(checked, sizes)
    state = state.noted(*map(str, lint), *doubt, *more, *left).spent("gate", time.perf_counter() - start)
    state, scores = _scored(state, request, proof)
    npu = placed(checked, request.source, recipe, device, request.device)
    facts: dict[str, object] = {"name": None, "bytes": None} if target is None else _facts_of(file, target)
    if state.tail is not None and target is not None:
        place = tail_path(target)
        rest = cleanup.enter_context(staged(state.tail, place, external_data=external, reads=reads))
        facts["tail"] = _facts_of(rest, place)
    record = _record(state, request, (reports, scores, npu), facts)
    if target is not None:
        write_text(record_path(target), record.to_json())
    return QuantizeResult(shown, target, state.plan, record, state.tail)


def _verified(
    state: State, source: ModelSource, file: Path
) -> tuple[tuple[OutputReport, ...], tuple[str, ...]]:
    """Prove the written file legal and measure it."""
    doubt = None
    if state.inputs and not state.recipe.prepare.nchw_to_nhwc:
        made = state.outputs[0]
        if state.tail is not None:
            made = tail_outputs(state.tail, {**state.inputs[0], **made})
        doubt = check_prepared(source, {**state.inputs[0], **state.fixed}, made)
    count = state.recipe.verify.samples
    lanes = Lanes.of(state.model, min(count, len(state.inputs)))
    session, joints = check_file(file, lanes.threads), joined_outputs(state.model.graph)
    reports = compare_outputs(
        session, state.inputs[:count], state.outputs[:count], source, joints, state.fixed, lanes
    )
    return reports, (doubt,) if doubt else ()


def _scored(state: State, request: Asked, file: Path) -> tuple[State, tuple[ModelScore, ...]]:
    """Both models on the data that was given to judge them."""
    asked, start = request.judging, time.perf_counter()
    if asked is None:
        return state, ()
    settings = state.recipe.data.model_copy(update={"samples": None})
    models: list[_Model | Path] = [request.float.model, file]
    if state.tail is not None:
        assert state.written is not None
        models = [joined(request.float.model, state.tail), joined(state.written, state.tail)]
    before, after = asked.scores(models, settings, request.told)
    loaded, target = state.loaded, request.target
    before = replace(before, model=loaded.name, file_bytes=loaded.file_bytes)
    after = replace(after, model="quantized" if target is None else target.name)
    return state.spent("evaluate", time.perf_counter() - start), (before, after)


Found = tuple[tuple[OutputReport, ...], tuple[ModelScore, ...], Mapping[str, Any]]
"""How near the outputs are, how accurate both models are, and where the file is expected to run."""


def _record(state: State, request: Asked, found: Found, file: Mapping[str, Any]) -> Record:
    assert state.written is not None
    loaded, target, (reports, scores, npu) = state.loaded, request.target, found
    facts, recipe = state.facts, state.recipe
    known = Known(
        float_model=str(loaded.path) if loaded.path else None,
        model=None if target is None else str(target),
        outputs=to_plain(reports),
        scores=[score.to_dict() for score in scores],
        samples=int(facts.get("samples_verified", 0)),
        random=bool(facts.get("random")),
        data=None if facts.get("path") is None else str(facts["path"]),
        npu=npu,
        recipe={"name": recipe.name, "effort": recipe.effort},
    )
    model = {
        "name": request.exported.name if request.exported else loaded.name,
        "path": str(loaded.path) if loaded.path else None,
        "sha256": file_sha256(loaded.path) if loaded.path else None,
        "bytes": loaded.file_bytes,
        "opset": loaded.source_opset,
        "fingerprint": fingerprint(state.model),
    }
    return Record(
        quantized=bool(state.plan.tensors) or any(n.op_type in _QUANTIZERS for n in state.written.graph),
        model=model,
        recipe=state.recipe.model_dump(mode="json"),
        data=state.facts,
        prepare=state.rewrites,
        counts=plan_counts(state.plan),
        float_nodes={n.name: n.reason for n in state.plan.nodes.values() if not n.quantized},
        improvements=state.steps,
        outputs=reports,
        held_out=state.held,
        seconds=state.seconds,
        notes=state.notes,
        file=file,
        asked={"device": request.device, **(request.judging.told() if request.judging else {})},
        scores=scores,
        npu=npu,
        verdict=verdict(known),
    )
