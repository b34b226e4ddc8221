"""What the data shows: statistics, and a few samples with the float model's own outputs for them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from roundel.calibrate.collect import Collected, collect
from roundel.calibrate.observers import OBSERVERS, Observer, StatKind
from roundel.calibrate.resolve import requests_for
from roundel.calibrate.statistics import Statistics, load_statistics, save_statistics
from roundel.data import ImagePreprocess, RandomSpec, SampleDigest, Samples, open_samples
from roundel.data.kept import KeptSamples
from roundel.data.lint import range_findings
from roundel.errors import DataError, RecipeError
from roundel.model.graph import (
    constant_array,
    fingerprint,
    input_specs,
    is_constant,
    is_float32,
    iter_values,
    table_rows,
    values_by_name,
)
from roundel.model.session import give_memory_back, open_session
from roundel.plan import QuantPlan
from roundel.recipe.settings import Data, Recipe
from roundel.types import BlockScheme, Listener, Sample
from roundel.work.work import Work

_KEPT_BYTES = 256_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """Statistics by tensor, and the samples that verification uses."""

    stats: Mapping[str, Observer] = field(default_factory=dict)
    inputs: Sequence[Sample] = ()
    outputs: Sequence[Sample] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def gather(
    model: ir.Model,
    plan: QuantPlan,
    recipe: Recipe,
    data: object,
    stats: str | Path | None,
    told: Listener,
    work: Work | None = None,
) -> Evidence:
    """Run the data once, or reuse what an earlier run saw of the same model and data.

    Args:
        model: the prepared float model.
        plan: says which tensors must be observed.
        recipe: methods, preprocessing, number of samples to keep.
        data: whatever `roundel.data.open_samples` takes; None is fine when the plan observes nothing.
        stats: a statistics file to reuse or to write.
        told: hears about progress.
        work: other processes or machines to share the samples with, and a memory of finished shards.
    """
    if stats is not None and recipe.mode == "weight_only":
        raise RecipeError(
            "Mode weight_only gathers no statistics.",
            where=f"--stats {stats}",
            hint="Leave the statistics file out.",
        )
    requests = requests_for(plan, recipe) or _doubtful(model, plan) if recipe.mode == "static" else {}
    learns = recipe.mode == "weight_only" and recipe.weight_only.algorithm == "gptq" and bool(plan.tensors)
    if data is None and not requests and not learns:
        return Evidence(data={"kind": "none needed"})
    samples = open_data(model, recipe.data, data)
    told.step("calibrate", samples.count)
    if learns:
        return _remembered(model, samples, recipe, told)
    if stats is None:
        keep = _kept(recipe, model)
        # Where no range is needed, samples beyond those that are compared would run for nothing.
        idle = recipe.mode == "static" and not requests
        used = islice(samples, max(1, keep)) if idle else samples
        collected = collect(model, requests, used, keep=keep, progress=told.advance, work=work)
        give_memory_back()
        return _evidence(collected, samples, recipe.verify.samples)
    path, key = Path(stats), fingerprint(model)
    saved = load_statistics(path) if path.exists() else None
    if saved is not None and saved.model_key == key and _covers(saved, requests):
        reused = _reuse(model, saved, samples, recipe, path)
        if reused is not None:
            return reused
    everything = {**_every_activation(model), **requests}
    wanted = dict.fromkeys(everything, _widest(requests))
    keep = _kept(recipe, model)
    collected = collect(model, wanted, samples, keep=keep, progress=told.advance, work=work)
    save_statistics(path, collected, key)
    why = "did not exist" if saved is None else "was of another model or other data"
    return _evidence(
        collected, samples, recipe.verify.samples, (f"statistics file {path.name} {why}: written anew",)
    )


def _kept(recipe: Recipe, model: ir.Model) -> int:
    """How many samples to keep: those that verify, and those that the improving steps look at."""
    if recipe.effort == "none" or recipe.mode != "static":
        return recipe.verify.samples
    return max(recipe.verify.samples, most_samples(recipe, model))


def most_samples(recipe: Recipe, model: ir.Model) -> int:
    """How many samples the improving steps may hold in memory."""
    sizes = [[d if isinstance(d, int) else 1 for d in spec.shape or ()] for spec in input_specs(model)]
    largest = max(1, sum(4 * math.prod(dims) for dims in sizes))
    return min(recipe.improve.samples, _KEPT_BYTES // largest)


def _remembered(model: ir.Model, samples: Samples, recipe: Recipe, told: Listener) -> Evidence:
    """All inputs, as far as memory goes, and the outputs of those that verify."""
    verified = max(1, recipe.verify.samples)
    inputs = KeptSamples()
    room = _KEPT_BYTES

    def watched() -> Iterator[Sample]:
        nonlocal room
        for sample in samples:
            room -= sum(array.nbytes for array in sample.values())
            if room >= 0 or len(inputs) < verified:
                inputs.append({name: array.copy() for name, array in sample.items()})
            yield sample

    collected = collect(model, {}, watched(), keep=verified, progress=told.advance)
    give_memory_back()
    seen = collected.samples_seen
    cut = f"the first {len(inputs)} of {seen} samples are learned from: more do not fit into memory"
    found = _evidence(collected, samples, recipe.verify.samples, () if len(inputs) == seen else (cut,))
    return replace(found, inputs=inputs)


def open_data(model: ir.Model, settings: Data, data: object) -> Samples:
    """The samples that the recipe's data section describes; samples that are open already are those."""
    if isinstance(data, Samples):
        return data
    if data is None and model.graph.inputs:
        raise DataError(
            "This recipe needs calibration data and none was given.",
            expected="a folder, a CalibrationDataReader or any iterable of samples",
            hint="Pass data=… (command line: --data DIR), or RandomData() (--random N) for a first look.",
        )
    random = data.within(table_rows(model.graph)) if isinstance(data, RandomSpec) else None
    preprocessing = settings.model_dump(exclude={"samples"}, exclude_defaults=True)
    images = ImagePreprocess(**preprocessing) if preprocessing else None
    source = None if random is not None else data
    return open_samples(source, input_specs(model), limit=settings.samples, images=images, random=random)


def _evidence(collected: Collected, samples: Samples, verified: int, notes: tuple[str, ...] = ()) -> Evidence:
    facts = {
        **samples.description,
        "samples_seen": collected.samples_seen,
        "samples_verified": min(verified, len(collected.inputs)),
        "digest": collected.data_digest,
        "forward_seconds": collected.forward_seconds,
    }
    if samples.description.get("random"):
        notes = (*notes, "calibrated on random data: ranges and accuracy mean nothing for real inputs")
    elif samples.inputs:
        ends = {name: (seen.lows, seen.highs) for name, seen in collected.stats.items()}
        odd = (*samples.findings, *range_findings(ends))
        notes = (*notes, *(f"calibration data: {finding}" for finding in odd))
    return Evidence(collected.stats, collected.inputs, collected.outputs, facts, notes)


def _covers(saved: Statistics, requests: Mapping[str, StatKind]) -> bool:
    return all(
        name in saved.stats and isinstance(saved.stats[name], OBSERVERS[kind])
        for name, kind in requests.items()
    )


def _reuse(
    model: ir.Model, saved: Statistics, samples: Samples, recipe: Recipe, path: Path
) -> Evidence | None:
    """The saved statistics, once the data proves to be the same; only the kept samples run forward."""
    digest = SampleDigest()
    inputs = KeptSamples()
    for sample in samples:
        digest.update(sample)
        if len(inputs) < _kept(recipe, model):
            inputs.append({name: array.copy() for name, array in sample.items()})
    if digest.hexdigest() != saved.data_key:
        if samples.repeatable:
            return None
        raise DataError(
            "The statistics file was made from other data, and this data can be read only once.",
            where=path,
            hint="Give another file name.",
        )
    session = open_session(model)
    names = [out.name for out in session.get_outputs()]
    runs = (session.run(None, sample) for sample in inputs)
    outputs = KeptSamples(dict(zip(names, run, strict=True)) for run in runs)
    facts = {
        **samples.description,
        "samples_seen": saved.samples_seen,
        "samples_verified": min(recipe.verify.samples, len(inputs)),
        "digest": saved.data_key,
        "statistics": path.name,
    }
    return Evidence(saved.stats, inputs, outputs, facts, (f"reused the statistics in {path.name}",))


def _doubtful(model: ir.Model, plan: QuantPlan) -> dict[str, StatKind]:
    """What to look at though it needs no range: blocks around minus infinity, which hold no numbers."""
    values = values_by_name(model.graph)
    blocks = [t.name for t in plan.tensors.values() if isinstance(t.scheme, BlockScheme)]
    constants = [value for value in values.values() if is_constant(value) and is_float32(value)]
    if not blocks or not any(map(_infinite, constants)):
        return {}
    return {name: StatKind.MINMAX for name in blocks if not is_constant(values[name])}


def _infinite(value: ir.Value) -> bool:
    array = constant_array(value)
    return array is not None and bool(np.isinf(array).any())


def _widest(requests: Mapping[str, StatKind]) -> StatKind:
    """Statistics that serve later runs with other methods, too."""
    return StatKind.EXPONENTS if StatKind.EXPONENTS in requests.values() else StatKind.HISTOGRAM


def _every_activation(model: ir.Model) -> dict[str, StatKind]:
    return {
        str(value.name): StatKind.HISTOGRAM
        for value in iter_values(model.graph)
        if is_float32(value) and not is_constant(value)
    }
