"""The whole run on one page: load, prepare, plan, collect, resolve, write, verify, report."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from roundel.calibrate.positions import refine
from roundel.calibrate.resolve import resolve
from roundel.errors import OutputError
from roundel.evidence import Evidence, gather
from roundel.model import LoadedModel, load_model, save_model
from roundel.model.graph import fingerprint
from roundel.model.load import ModelSource
from roundel.model.opset import raise_opset
from roundel.model.save import check_writable, write_text
from roundel.passes import PassReport, prepare
from roundel.plan import QuantPlan, build_plan
from roundel.qdq import simulate, write_dynamic, write_qdq
from roundel.recipe import Recipe
from roundel.recipe_file import RecipeSource, load_recipe
from roundel.report.clock import Clock
from roundel.report.listener import Listener, Silent
from roundel.report.record import Record, plan_counts, recipe_dict
from roundel.verify import check_file, check_prepared, compare_outputs
from roundel.verify.closeness import OutputReport
from roundel.verify.legality import check_scales
from roundel.version import VERSION


@dataclass(frozen=True, slots=True, eq=False)
class QuantizeResult:
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
        return ir.to_proto(self.ir)

    def save(self, path: str | Path) -> Path:
        """Write the model and, beside it, its record; both appear whole or not at all."""
        target = Path(path)
        save_model(self.ir, target, external_data=self.record.recipe["output"]["external_data"])
        write_text(record_path(target), self.record.to_json())
        return target


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A model that is ready to be planned."""

    loaded: LoadedModel
    model: ir.Model
    reports: tuple[PassReport, ...]
    notes: tuple[str, ...]


def quantize(
    model: ModelSource,
    output: str | Path | None = None,
    *,
    recipe: RecipeSource = "a8w8",
    data: object = None,
    samples: int | None = None,
    exclude: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
    stats: str | Path | None = None,
    listener: Listener | None = None,
) -> QuantizeResult:
    """Quantize a float model.

    Args:
        model: an ONNX file, a ModelProto, or an onnx-ir model. It is never changed.
        output: the file to write; a record `NAME.json` appears beside it. None keeps all in memory.
        recipe: a preset name in any case, a recipe file, a mapping, or a Recipe.
        data: calibration data: ONNX Runtime's CalibrationDataReader, any iterable of dicts or arrays, a
            DataLoader, a folder of images or .npy files, or `roundel.RandomData()`.
        samples: use at most this many samples.
        exclude: nodes that stay float: names, globs, 're:REGEX' or 'op:TYPE'.
        changes: recipe values that differ from the recipe's own, nested as in the file.
        stats: a statistics file to reuse, or to write when it does not fit this model and data.
        listener: told about progress.

    Raises:
        RoundelError: something in the model, the data or the recipe is wrong; nothing was written.
    """
    told, clock = listener or Silent(), Clock()
    settings = load_recipe(recipe, changed(changes, samples, exclude))
    target = _checked_output(output, model)
    try:
        told.step("load and prepare")
        with clock("prepare"):
            ready = load_prepared(model, settings)
        told.step("plan")
        with clock("plan"):
            plan = build_plan(ready.model, settings)
        with clock("collect"):
            evidence = gather(ready.model, plan, settings, data, stats, told)
        told.step("write")
        with clock("write"):
            result, plan, notes = _write(ready.model, plan, evidence, settings)
        told.step("verify")
        with clock("verify"):
            reports, doubt = _verify(model, result, evidence, settings, target)
        size = target.stat().st_size if target else None
        record = Record(
            quantized=bool(plan.tensors) or settings.mode == "dynamic",
            model=_describe(ready),
            recipe=recipe_dict(settings),
            data=evidence.data,
            prepare={r.name: r.rewrites for r in ready.reports if r.rewrites},
            counts=plan_counts(plan),
            float_nodes={n.name: n.reason for n in plan.nodes.values() if not n.quantized},
            outputs=reports,
            seconds=clock.seconds,
            notes=(*ready.notes, *evidence.notes, *notes, *doubt),
            file={"name": target.name if target else None, "bytes": size},
        )
        if target is not None:
            write_text(record_path(target), record.to_json())
        return QuantizeResult(result, target, plan, record)
    finally:
        told.close()


def load_prepared(source: ModelSource, recipe: Recipe) -> Prepared:
    """Load a float model and run the passes that the recipe asks for."""
    loaded = load_model(source)
    notes = list(loaded.notes)
    if recipe.output.opset is not None:
        notes += raise_opset(loaded.model, recipe.output.opset)
    reports = prepare(loaded.model, recipe.prepare)
    return Prepared(loaded, loaded.model, reports, tuple(notes))


def changed(changes: Mapping[str, Any] | None, samples: int | None, exclude: Sequence[str]) -> dict[str, Any]:
    """The short options as recipe changes."""
    tree: dict[str, Any] = {
        key: dict(v) if isinstance(v, Mapping) else v for key, v in (changes or {}).items()
    }
    if samples is not None:
        tree.setdefault("data", {})["samples"] = samples
    if exclude:
        selection = tree.setdefault("selection", {})
        selection["exclude"] = [*selection.get("exclude", ()), *exclude]
    return tree


def record_path(model_path: Path) -> Path:
    """Where the record of a written model goes."""
    return model_path.with_suffix(".json")


def _write(
    model: ir.Model, plan: QuantPlan, evidence: Evidence, recipe: Recipe
) -> tuple[ir.Model, QuantPlan, tuple[str, ...]]:
    if recipe.mode == "dynamic":
        chosen = frozenset(n.name for n in plan.nodes.values() if n.quantized)
        written, count = write_dynamic(model, recipe, chosen)
        return _signed(written), plan, (f"{count} nodes quantize their input at run time",)
    if not plan.tensors:
        return _signed(model.clone()), plan, ("nothing to quantize: the float model was passed through",)
    state = refine(model, resolve(model, plan, evidence.stats, recipe), recipe.npu)
    written = write_qdq(model, state, recipe)
    simulated = simulate(written, state, recipe.npu)
    check_scales(written)
    told = tuple(f"{what}: {count} nodes" for what, count in simulated.items())
    return _signed(written), state.plan, (*state.notes, *told)


def _verify(
    source: ModelSource, result: ir.Model, evidence: Evidence, recipe: Recipe, target: Path | None
) -> tuple[tuple[OutputReport, ...], tuple[str, ...]]:
    """Prove the result legal and measure it; only then does the file appear."""
    reports: list[OutputReport] = []

    def judge(path: Path) -> None:
        session = check_file(path)
        reports.extend(compare_outputs(session, evidence.inputs, evidence.outputs))

    doubt = None
    if evidence.inputs and not recipe.prepare.nchw_to_nhwc:
        doubt = check_prepared(source, evidence.inputs[0], evidence.outputs[0])
    if target is not None:
        save_model(result, target, external_data=recipe.output.external_data, check=judge)
    else:
        with tempfile.TemporaryDirectory(prefix="roundel-") as folder:
            save_model(result, Path(folder) / "model.onnx", check=judge)
    return tuple(reports), (doubt,) if doubt else ()


def _checked_output(output: str | Path | None, model: ModelSource) -> Path | None:
    if output is None:
        return None
    target = Path(output)
    check_writable(target)
    if isinstance(model, str | Path) and target.exists() and target.samefile(model):
        raise OutputError(
            "The output would overwrite the input model.", where=target, hint="Choose another output path."
        )
    return target


def _signed(model: ir.Model) -> ir.Model:
    model.producer_name, model.producer_version = "roundel", VERSION
    return model


def _describe(ready: Prepared) -> dict[str, Any]:
    loaded = ready.loaded
    return {
        "name": loaded.path.name if loaded.path else "in memory",
        "bytes": loaded.file_bytes,
        "opset": loaded.source_opset,
        "fingerprint": fingerprint(ready.model),
    }
