"""The whole run on one page: load, prepare, plan, collect, resolve, write, verify, report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from roundel.baseline import establish
from roundel.calibrate.positions import refine
from roundel.calibrate.resolve import resolve
from roundel.card import Card
from roundel.data import open_samples
from roundel.errors import OutputError, RecipeError
from roundel.evidence import Evidence, gather, most_samples, open_data
from roundel.execution import choose_execution
from roundel.forecasting import Forecast, look_ahead
from roundel.gate import (
    OutputReport,
    advice,
    check_file,
    check_limits,
    check_prepared,
    check_scales,
    compare_outputs,
)
from roundel.improve.finetune import check_tuning
from roundel.improve.improve import Improved, improve
from roundel.improve.mixed import mix_layers
from roundel.improve.outliers import Spread, spread_outliers
from roundel.improve.weight_only import pack_weights
from roundel.measure.lint import quantize_findings
from roundel.model import LoadedModel, save_model
from roundel.model.files import (
    check_writable,
    external_values,
    file_sha256,
    model_sha256,
    same_file,
    self_contained,
    staged_or_temporary,
    write_text,
)
from roundel.model.graph import fingerprint, input_specs, weight_bytes
from roundel.model.load import ModelSource
from roundel.model.memory import parse_size, within
from roundel.model.structure import blaming
from roundel.outputs import record_path
from roundel.plan import QuantPlan, build_plan
from roundel.plan.float_parts import Joint, joined_outputs, spared_notes
from roundel.preparation import Prepared, load_prepared
from roundel.qdq import simulate, strip, write_dynamic, write_qdq
from roundel.qdq.weight_only import check_kernel, write_weights
from roundel.qdq.write import share_codes
from roundel.recipe.load import RecipeSource, load_recipe, unfolded
from roundel.recipe.settings import Recipe, WeightOnly, merge
from roundel.report.record import Clock, Record, plan_counts, recipe_dict, run_card
from roundel.rules.fitting import for_device, for_effort, remaining
from roundel.torch import Exported, is_torch_source, opened
from roundel.torch.export import require_torch
from roundel.types import Listener, Sample, Silent
from roundel.version import VERSION
from roundel.work.checkpoints import Store, open_store
from roundel.work.executors import Executor
from roundel.work.work import Work

_NOTHING = "nothing to quantize: the float model was passed through"
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

    def card(self) -> Mapping[str, object]:
        """What matters most of the record."""
        return run_card(self.record)

    @property
    def model(self) -> onnx.ModelProto:
        """The quantized model as a protobuf."""
        return ir.to_proto(self_contained(self.ir))

    def as_torch(self) -> Any:
        """The quantized model as a torch module for evaluation: tensors in, tensors out; needs torch."""
        require_torch()
        from roundel.torch.evaluation import QuantizedModule

        return QuantizedModule(self.ir)

    def save(self, path: str | Path) -> Path:
        """Write the model and, beside it, its record; both appear whole or not at all."""
        target = Path(path)
        save_model(self.ir, target, external_data=self.record.recipe["output"]["external_data"])
        write_text(record_path(target), self.record.to_json())
        return target


def quantize(
    model: Any,
    output: str | Path | None = None,
    *,
    recipe: RecipeSource = "a8w8",
    data: object = None,
    samples: int | None = None,
    exclude: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
    stats: str | Path | None = None,
    device: str | None = None,
    effort: str | None = None,
    executor: Executor | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    device_exec: str | None = None,
    max_memory: str | int | None = None,
    on_forecast: Callable[[Forecast], None] | None = None,
    example_inputs: object = None,
    dynamic_batch: bool = False,
    dynamic_shapes: Any = None,
    listener: Listener | None = None,
) -> QuantizeResult:
    """Quantize a float model.

    Args:
        model: an ONNX file, a ModelProto, or an onnx-ir model; or of PyTorch: a module, a torch.export
            program, a .pt2 file, or 'package.module:factory'. It is never changed.
        output: the file to write; a record `NAME.json` appears beside it. None keeps all in memory.
        recipe: a preset name in any case, a recipe file, a mapping, or a Recipe.
        data: calibration data: ONNX Runtime's CalibrationDataReader, any iterable of dicts or arrays, a
            DataLoader, a folder of images or .npy files, or `roundel.RandomData()`.
        samples: use at most this many samples.
        exclude: nodes that stay float: names, globs, 're:REGEX' or 'op:TYPE'.
        changes: recipe values that differ from the recipe's own, nested as in the file or with dots:
            `{"weights.type": "int8"}`.
        stats: a statistics file to reuse, or to write when it does not fit this model and data.
        device: the NPU it is for (phx, stx, krk …): what helps placement there and is exact is applied, and
            what is left is listed in the record's notes.
        effort: none (calibration only), fast or high; the recipe's own when not given.
        executor: where calibration runs, from `roundel.executor(…)`; this process when not given.
        checkpoint: a folder that holds what is done: each shard of the samples, each layer of the rest.
        resume: go on from the checkpoint where there is one; the file is that of a run without a break.
        device_exec: where calibration and fine-tuning run: cpu, cuda (an error where it is missing), or auto,
            which takes a GPU if there is one; the record says what was chosen.
        max_memory: the most memory that this process may take: '2G', '512M' or bytes. With less, the same
            result comes from more passes and from temporary files. Each worker may take as much.
        on_forecast: hears what the run is expected to take, before it begins.
        example_inputs: PyTorch: a tensor, a tuple of arguments, a dict by parameter name, or a list of such
            examples. The first is traced; on all of them the export must equal the module.
        dynamic_batch: PyTorch: leave the first dimension of all inputs open.
        dynamic_shapes: PyTorch: open dimensions in torch.export's notation.
        listener: told about progress.

    Raises:
        RoundelError: something in the model, the data or the recipe is wrong; nothing was written.
    """
    told, clock = listener or Silent(), Clock()
    with ExitStack() as cleanup:
        cleanup.callback(told.close)
        settings = load_recipe(recipe, changed(changes, samples, exclude, effort))
        settings = for_effort(for_device(settings, device))
        target = _checked_output(output, model, recipe, stats)
        chosen = choose_execution(device_exec, settings)
        settings = chosen.recipe
        check_tuning(settings)
        check_kernel(settings)
        limit = None if max_memory is None else parse_size(max_memory)
        work = Work(executor, open_store(checkpoint, resume=resume), chosen.calibration)
        told.step("load and prepare")
        with clock("prepare"):
            model, exported = _as_onnx(model, example_inputs, dynamic_batch, dynamic_shapes)
            cleanup.enter_context(blaming(model))
            ready = entrance = load_prepared(model, settings)
        _refuse_external_target(target, ready.loaded)
        data = data if data is None else open_data(ready.model, settings.data, data)
        cleanup.enter_context(within(look_ahead(ready.model, settings, data, limit, on_forecast)))
        with clock("outliers"):
            spread, data = _spread(ready.model, settings, data, told)
        ready = replace(ready, model=spread.model, notes=(*ready.notes, *spread.notes))
        base = establish(ready, settings, data, stats, told, clock, work)
        ready, plan, evidence = base.ready, base.plan, base.evidence
        with clock("mix"):
            plan, evidence = _mix(ready.model, plan, evidence, settings, told)
        told.step("write")
        with clock("write"):
            result, plan, improved = _write(ready.model, plan, evidence, settings, told, work.store)
            # The file takes its place only when everything below has ended well.
            shown = strip(result) if settings.output.strip_functions else result
            file = cleanup.enter_context(
                staged_or_temporary(shown, target, external_data=settings.output.external_data)
            )
            # Operators without bodies run in no plain session: the same graph with them is the proof.
            proof = file if shown is result else cleanup.enter_context(staged_or_temporary(result, None))
        told.step("verify")
        with clock("verify"):
            reports, doubt = _verify(model, proof, evidence, settings, joined_outputs(ready.model.graph))
            left = remaining(model, settings, device)
            odd = quantize_findings(
                entrance.model, entrance.norms, (evidence.inputs, evidence.outputs), evidence.data
            )
        size = file.stat().st_size if target else None
        record = Record(
            quantized=bool(plan.tensors) or any(node.op_type in _QUANTIZERS for node in result.graph),
            model=_describe(ready, exported),
            recipe=recipe_dict(settings),
            data=evidence.data,
            prepare={r.name: r.rewrites for r in ready.reports if r.rewrites},
            counts=plan_counts(plan),
            float_nodes={n.name: n.reason for n in plan.nodes.values() if not n.quantized},
            improvements=(*spread.steps, *base.steps, *improved.steps),
            outputs=reports,
            seconds=clock.seconds,
            notes=(
                *chosen.notes,
                *(exported.notes if exported else ()),
                *ready.notes,
                *spared_notes(plan.nodes),
                *evidence.notes,
                *map(str, odd),
                *improved.notes,
                *doubt,
                *(() if evidence.data.get("random") else advice(reports, settings)),
                *left,
            ),
            file={
                "name": target.name if target else None,
                "bytes": size,
                **({"sha256": model_sha256(file)} if target else {}),
            },
        )
        if target is not None:
            write_text(record_path(target), record.to_json())
    return QuantizeResult(shown, target, plan, record)


def changed(
    changes: Mapping[str, Any] | None,
    samples: int | None,
    exclude: Sequence[str],
    effort: str | None = None,
) -> dict[str, Any]:
    """The short options as recipe changes."""
    tree = unfolded(changes or {})
    if effort is not None:
        tree["effort"] = effort
    if samples is not None:
        tree = merge(tree, {"data": {"samples": samples}})
    if exclude:
        selection = tree.get("selection")
        before = selection.get("exclude", ()) if isinstance(selection, Mapping) else ()
        words = [before] if isinstance(before, str) else before
        tree = merge(tree, {"selection": {"exclude": [*words, *exclude]}})
    return tree


def _as_onnx(
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


def _spread(model: ir.Model, recipe: Recipe, data: object, told: Listener) -> tuple[Spread, object]:
    """Where the recipe asks for it, rotated and smoothed; and the data, of which nothing is lost."""
    if not (recipe.improve.rotate.enabled or recipe.improve.smooth.enabled):
        return Spread(model), data
    plain = recipe.merged({"effort": "none", "weight_only": {"algorithm": "round"}})

    def quantized(candidate: ir.Model, learn: Sequence[Sample]) -> ir.Model:
        plan = build_plan(candidate, plain)
        again = open_samples(learn, input_specs(candidate))
        evidence = gather(candidate, plan, plain, again, None, Silent())
        return _write(candidate, plan, evidence, plain, Silent(), None)[0]

    samples = open_data(model, recipe.data, data)
    first = samples.first(most_samples(recipe, model))
    return spread_outliers(model, first, recipe, quantized, told), samples


def _mix(
    model: ir.Model, plan: QuantPlan, evidence: Evidence, recipe: Recipe, told: Listener
) -> tuple[QuantPlan, Evidence]:
    """Where data decides which layers take the recipe's second type: the plan that has them."""
    if not recipe.mixed.searched:
        return plan, evidence
    told.step("choose mixed layers")
    count = recipe.verify.samples
    samples, outputs = evidence.inputs[:count], evidence.outputs[:count]
    plan, note = mix_layers(
        model, evidence.stats, samples, outputs, recipe, lambda done, total: told.advance(done)
    )
    return plan, replace(evidence, notes=(*evidence.notes, note))


def _write(
    model: ir.Model,
    plan: QuantPlan,
    evidence: Evidence,
    recipe: Recipe,
    told: Listener,
    store: Store | None,
) -> tuple[ir.Model, QuantPlan, Improved]:
    """The quantized graph, the plan as it was carried out, and what was done beyond calibration."""
    if recipe.mode == "dynamic":
        return _measure_at_run_time(model, plan, recipe)
    if not plan.tensors:
        return _signed(model.clone()), plan, _untouched(_NOTHING)
    if recipe.mode == "weight_only":
        return _pack(model, plan, evidence, recipe.weight_only, told)
    state = refine(model, resolve(model, plan, evidence.stats, recipe), recipe.npu)
    count = recipe.improve.samples
    samples, outputs = evidence.inputs[:count], evidence.outputs[:count]
    improved = improve(model, state, samples, outputs, recipe, told, store)
    state = improved.state or state
    written = write_qdq(model, state, recipe)
    share_codes(written.graph)
    simulated = simulate(written, state, recipe.npu)
    check_scales(written)
    check_limits(model, state, recipe.npu)
    done = tuple(f"{what}: {count} nodes" for what, count in simulated.items())
    return _signed(written), state.plan, replace(improved, notes=(*state.notes, *improved.notes, *done))


def _measure_at_run_time(
    model: ir.Model, plan: QuantPlan, recipe: Recipe
) -> tuple[ir.Model, QuantPlan, Improved]:
    """Mode dynamic; the plan says which nodes were left as they were after all."""
    chosen = frozenset(n.name for n in plan.nodes.values() if n.quantized)
    written, count = write_dynamic(model, recipe, chosen)
    left = {str(node.name) for node in written.graph} & chosen
    reason = "its weight is computed, or of a form without an integer operator"
    nodes = {
        n.name: replace(n, quantized=False, reason=reason) if n.name in left else n
        for n in plan.nodes.values()
    }
    plan = replace(plan, nodes=nodes, tensors=plan.tensors if count else {})
    note = f"{count} nodes quantize their input at run time" if count else _NOTHING
    return _signed(written), plan, _untouched(note)


def _pack(
    model: ir.Model, plan: QuantPlan, evidence: Evidence, options: WeightOnly, told: Listener
) -> tuple[ir.Model, QuantPlan, Improved]:
    """Mode weight_only: the matrices in few bits, all else as it was."""
    done = pack_weights(model, plan, evidence.inputs, options, told)
    told.step("write")
    written = write_weights(model, done.layers, done.packed, options)
    sizes = ", ".join(f"{weight_bytes(m) / 1e6:.1f} MB" for m in (model, written))
    note = f"{len(done.packed)} weights in {options.bits} bits; constants before and after: {sizes}"
    return _signed(written), plan, Improved(None, done.steps, (note,))


def _untouched(note: str) -> Improved:
    return Improved(None, (), (note,))


def _verify(
    source: ModelSource, file: Path, evidence: Evidence, recipe: Recipe, joints: Mapping[str, Joint]
) -> tuple[tuple[OutputReport, ...], tuple[str, ...]]:
    """Prove the written file legal and measure it."""
    doubt = None
    if evidence.inputs and not recipe.prepare.nchw_to_nhwc:
        doubt = check_prepared(source, evidence.inputs[0], evidence.outputs[0])
    session = check_file(file)
    count = recipe.verify.samples
    reports = compare_outputs(session, evidence.inputs[:count], evidence.outputs[:count], source, joints)
    return reports, (doubt,) if doubt else ()


def _checked_output(
    output: str | Path | None, model: object, recipe: RecipeSource, stats: str | Path | None
) -> Path | None:
    if output is None:
        return None
    target = Path(output)
    check_writable(target)
    if record_path(target) == target:
        raise OutputError(
            "The output's name is that of its record.",
            where=target,
            expected="a name that does not end in .json, for example model.a8w8.onnx",
        )
    check_writable(record_path(target))
    file = model.path if isinstance(model, Exported) else model
    sources = {"input model": file, "recipe": recipe, "statistics file": stats}
    for what, source in sources.items():
        if isinstance(source, str | Path):
            _refuse_overwriting(target, Path(source), what)
    return target


def _refuse_overwriting(target: Path, source: Path, what: str) -> None:
    for written, name in ((target, "output"), (record_path(target), "output's record")):
        if same_file(written, source):
            raise OutputError(
                f"The {name} would overwrite the {what}.", where=written, hint="Choose another output path."
            )


def _refuse_external_target(target: Path | None, loaded: LoadedModel) -> None:
    if target is not None:
        for path in {str(tensor.path) for _, tensor in external_values(loaded.model)}:
            _refuse_overwriting(target, Path(path), "input model's external data")


def _signed(model: ir.Model) -> ir.Model:
    model.producer_name, model.producer_version = "roundel", VERSION
    return model


def _describe(ready: Prepared, exported: Exported | None) -> dict[str, Any]:
    loaded = ready.loaded
    name = loaded.path.name if loaded.path else "in memory"
    return {
        "name": exported.name if exported else name,
        "path": str(loaded.path) if loaded.path else None,
        "sha256": file_sha256(loaded.path) if loaded.path else None,
        "bytes": loaded.file_bytes,
        "opset": loaded.source_opset,
        "fingerprint": fingerprint(ready.model),
    }
