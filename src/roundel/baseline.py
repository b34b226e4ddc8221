"""The calibrated model that the improving steps start from: equalized where a held-out error falls by it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from roundel.calibrate.collect import collect
from roundel.calibrate.resolve import requests_for
from roundel.data import Samples
from roundel.errors import InfiniteTensorError
from roundel.evidence import Evidence, gather, open_data
from roundel.improve.equalize import equalize, try_equalization
from roundel.improve.judge import StepReport
from roundel.improve.reports import FEWEST
from roundel.model.graph import values_by_name
from roundel.passes import PassReport
from roundel.plan import QuantPlan, build_plan
from roundel.preparation import Prepared
from roundel.recipe.settings import Recipe
from roundel.report.record import Clock
from roundel.types import Listener
from roundel.work.executors import Work


@dataclass(frozen=True, slots=True, eq=False)
class Baseline:
    """What everything after it works on.

    Attributes:
        ready: the float model.
        plan: of it.
        evidence: what the data shows of it.
        steps: what was tried to get there.
    """

    ready: Prepared
    plan: QuantPlan
    evidence: Evidence
    steps: tuple[StepReport, ...] = ()


def establish(
    ready: Prepared,
    recipe: Recipe,
    data: object,
    stats: str | Path | None,
    told: Listener,
    clock: Clock,
    work: Work | None = None,
) -> Baseline:
    """Plan and calibrate the model, and choose between it and its equalized form.

    A tensor that turns out to be infinite (a mask of minus infinity, computed from the inputs) has no range:
    the nodes that make and read it stay in float, and the data runs again.

    Args:
        ready: the prepared float model.
        recipe: effort and formats.
        data: whatever `roundel.data.open_samples` takes.
        stats: a statistics file to reuse or to write.
        told: hears about progress.
        clock: takes the time.
        work: other processes or machines to share the samples with, and a memory of finished shards.
    """
    given = data if data is None else open_data(ready.model, recipe.data, data)
    spared: dict[str, str] = {}
    while True:
        try:
            found = _established(ready, _sparing(recipe, spared), given, stats, told, clock, work)
            return _explained(found, spared)
        except InfiniteTensorError as error:
            around = _around(ready.model, error.tensors)
            if given is None or not given.repeatable or around.keys() <= spared.keys():
                raise
            spared |= around


def _sparing(recipe: Recipe, nodes: Collection[str]) -> Recipe:
    if not nodes:
        return recipe
    return recipe.merged({"selection": {"exclude": [*recipe.selection.exclude, *nodes]}})


def _around(model: ir.Model, tensors: Collection[str]) -> dict[str, str]:
    """The nodes that make or read these tensors, each with the reason why it stays in float."""
    values = values_by_name(model.graph)
    found: dict[str, str] = {}
    for name in tensors:
        for node in (values[name].producer(), *values[name].consumers()):
            if node is not None and node.graph is model.graph:
                found.setdefault(str(node.name), f"tensor '{name}' is infinite for the calibration data")
    return found


def _explained(found: Baseline, spared: Mapping[str, str]) -> Baseline:
    nodes = {
        name: replace(node, reason=spared[name]) if name in spared and not node.quantized else node
        for name, node in found.plan.nodes.items()
    }
    return replace(found, plan=replace(found.plan, nodes=nodes)) if spared else found


def _established(
    ready: Prepared,
    recipe: Recipe,
    given: Samples | None,
    stats: str | Path | None,
    told: Listener,
    clock: Clock,
    work: Work | None,
) -> Baseline:
    with clock("prepare"):
        evened = _equalized(ready, recipe)
    told.step("plan")
    with clock("plan"):
        plan = build_plan((evened or ready).model, recipe)
    with clock("collect"):
        found = gather((evened or ready).model, plan, recipe, given, stats, told, work)
    found = _opened(((evened or ready).model, ready.model), found)
    first = Baseline(evened or ready, plan, found)
    if evened is None:
        return first
    with clock("equalize"):
        step = _tried(ready.model, evened.model, first.evidence, recipe, told)
    steps = () if step is None else (step,)
    if step is not None and step.kept:
        return replace(first, steps=steps)
    with clock("collect"):
        return Baseline(ready, *_again(ready.model, first.evidence, recipe, given, work), steps)


def _opened(models: Collection[ir.Model], found: Evidence) -> Evidence:
    """Outputs that have another shape than the model declares lose it, with a note."""
    notes = list(found.notes)
    for name, array in (found.outputs[0] if found.outputs else {}).items():
        for model in models:
            value = next((v for v in model.graph.outputs if v.name == name), None)
            if value is None or value.shape is None or _fits(value.shape, np.shape(array)):
                continue
            real = list(np.shape(array))
            note = f"output '{name}' has shape {real}, not {value.shape} as declared: left open"
            notes += [] if note in notes else [note]
            value.shape = ir.Shape([None] * np.ndim(array))
    return replace(found, notes=tuple(notes))


def _fits(declared: ir.Shape, real: tuple[int, ...]) -> bool:
    pairs = zip(declared, real, strict=False)
    return len(declared) == len(real) and all(not isinstance(d, int) or d == r for d, r in pairs)


def _equalized(ready: Prepared, recipe: Recipe) -> Prepared | None:
    """A rescaled copy; None where effort does not ask for it or nothing can be rescaled."""
    options = recipe.improve.equalize
    if recipe.effort == "none" or recipe.mode != "static" or not options.enabled:
        return None
    model = ready.model.clone()
    done = equalize(model, options, power_of_two=recipe.weights.scale == "power_of_two")
    if not done.layers:
        return None
    report = PassReport("equalize", done.channels, done.seconds)
    return replace(ready, model=model, reports=(*ready.reports, report))


def _tried(
    plain: ir.Model, evened: ir.Model, evidence: Evidence, recipe: Recipe, told: Listener
) -> StepReport | None:
    """The trial's verdict; None where there is nothing to judge by."""
    count = recipe.improve.samples
    samples, outputs = evidence.inputs[:count], evidence.outputs[:count]
    if len(samples) < FEWEST:
        return None
    told.step("try equalization")
    return try_equalization(plain, evened, samples, outputs, recipe)


def _again(
    model: ir.Model, earlier: Evidence, recipe: Recipe, given: Samples | None, work: Work | None
) -> tuple[QuantPlan, Evidence]:
    """Plan and statistics of the model as it was, from the same data."""
    plan = build_plan(model, recipe)
    requests = requests_for(plan, recipe)
    if not requests:
        return plan, replace(earlier, stats={})
    seen, notes = int(earlier.data.get("samples_seen", 0)), earlier.notes
    whole = given is not None and given.repeatable and seen > len(earlier.inputs)
    if not whole and seen > len(earlier.inputs):
        count = len(earlier.inputs)
        notes += (f"ranges come from the first {count} of {seen} samples: the data can be read only once",)
    samples = given if whole and given is not None else earlier.inputs
    found = collect(model, requests, samples, keep=0, work=work, step="calibrate-again")
    return plan, replace(earlier, stats=found.stats, notes=notes)
