"""The stages of every run: prepare, plan, collect, resolve, write. Each takes a state and returns the next.

May import all rooms that know formats and graphs; knows nothing of the steps that improve a state.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import numpy as np
import onnx_ir as ir

from roundel.calibrate.collect import Collected
from roundel.calibrate.collect import collect as observe
from roundel.calibrate.observers import OBSERVERS, Statistics, StatKind, load_statistics, save_statistics
from roundel.calibrate.positions import refine
from roundel.calibrate.resolve import requests_for
from roundel.calibrate.resolve import resolve as scales_of
from roundel.calibrate.runner import run_session
from roundel.data import RandomSpec, SampleDigest, Samples, open_samples
from roundel.data.fixed import without_constants
from roundel.data.kept import KeptSamples
from roundel.data.lint import range_findings
from roundel.data.lint_values import first_norms
from roundel.errors import DataError, InfiniteTensorError, RecipeError
from roundel.heads import NO_HEAD, cut_head, cut_note
from roundel.model import load_model
from roundel.model.graph import (
    constant_array,
    fingerprint,
    input_specs,
    is_constant,
    is_float32,
    iter_values,
    table_rows,
    values_by_name,
    weight_bytes,
)
from roundel.model.normalise import raise_opset
from roundel.model.session import Lanes, give_memory_back, open_session
from roundel.model.structure import ModelSource
from roundel.numerics.packed import round_packed
from roundel.passes import input_constants
from roundel.passes import prepare as run_passes
from roundel.plan import QuantPlan, build_plan
from roundel.plan.build import weight_layers
from roundel.plan.float_parts import float_part_notes
from roundel.qdq import simulate, write_dynamic, write_qdq
from roundel.qdq.weight_only import write_weights
from roundel.qdq.write import share_codes
from roundel.recipe.settings import Data, Recipe
from roundel.state import Context, Few, State
from roundel.types import Array, BlockScheme, Sample
from roundel.version import VERSION

NOTHING = "nothing to quantize: the float model was passed through"
_KEPT_BYTES = 256_000_000
_Given = ParamSpec("_Given")


def timed(
    name: str,
) -> Callable[[Callable[Concatenate[State, _Given], State]], Callable[Concatenate[State, _Given], State]]:
    """Books a stage's time under its name."""

    def around(stage: Callable[Concatenate[State, _Given], State]) -> Callable[..., State]:
        @functools.wraps(stage)
        def run(state: State, /, *given: _Given.args, **options: _Given.kwargs) -> State:
            start = time.perf_counter()
            return stage(state, *given, **options).spent(name, time.perf_counter() - start)

        return run

    return around


# Prepare: from any source to a float model that can be planned.


def prepare(source: ModelSource, recipe: Recipe) -> State:
    """Load a float model and run the passes that the recipe asks for."""
    start = time.perf_counter()
    loaded = load_model(source)
    notes = list(loaded.notes)
    if recipe.wanted_opset is not None:
        notes += raise_opset(loaded.model, recipe.wanted_opset)
    fixed = input_constants(loaded.model, recipe.prepare.fixed_inputs)
    norms = first_norms(loaded.model.graph)
    rewrites = {r.name: r.rewrites for r in run_passes(loaded.model, recipe.prepare) if r.rewrites}
    cut = cut_head(loaded.model) if recipe.prepare.cut_head else None
    if recipe.prepare.cut_head:
        notes.append(NO_HEAD if cut is None else cut_note(cut))
    about: dict[str, Any] = {"norms": norms, "rewrites": rewrites, "fixed": fixed}
    if cut is not None:
        loaded, about["tail"] = replace(loaded, model=cut.model), cut.tail
    state = State(recipe=recipe, model=loaded.model, loaded=loaded, **about)
    return state.noted(*notes).spent("prepare", time.perf_counter() - start)


# The data.


def open_data(
    model: ir.Model, settings: Data, data: object, fixed: Mapping[str, Array] | None = None
) -> Samples:
    """The samples that the recipe's data section describes; samples that are open already are those.

    Args:
        model: the prepared float model.
        settings: of the recipe.
        data: whatever `open_samples` takes.
        fixed: inputs that the model no longer has, since they are constants; samples may still hold them.
    """
    if isinstance(data, Samples):
        return data
    if data is None and model.graph.inputs:
        raise DataError(
            "This recipe needs calibration data and none was given.",
            expected="a folder, a CalibrationDataReader or any iterable of samples",
            hint="Pass data=… (command line: --data DIR), or RandomData() (--random N) for a first look.",
        )
    data = data.within(table_rows(model.graph)) if isinstance(data, RandomSpec) else data
    images = settings if settings.model_dump(exclude={"samples"}, exclude_defaults=True) else None
    ignored: dict[str, None] = {}
    data = without_constants(data, fixed or {}, ignored)
    samples = open_samples(data, input_specs(model), limit=settings.samples, images=images)
    samples.ignored = ignored
    return samples


def most_samples(recipe: Recipe, model: ir.Model) -> int:
    """How many samples the improving steps may hold in memory."""
    sizes = [[d if isinstance(d, int) else 1 for d in spec.shape or ()] for spec in input_specs(model)]
    largest = max(1, sum(4 * math.prod(dims) for dims in sizes))
    return min(recipe.improve.samples, _KEPT_BYTES // largest)


def kept_samples(recipe: Recipe, model: ir.Model) -> int:
    """How many samples a run keeps: those that verify, and those that the improving steps look at."""
    if recipe.effort == "none" or recipe.mode != "static":
        return recipe.verify.samples
    return max(recipe.verify.samples, most_samples(recipe, model))


# Plan.


@timed("plan")
def plan(state: State, spared: Mapping[str, str] | None = None) -> State:
    """Decide what every tensor becomes.

    Args:
        state: prepared.
        spared: further nodes that stay in float, each with the reason.
    """
    recipe, spared = state.recipe, spared or {}
    if spared:
        recipe = recipe.merged({"selection": {"exclude": [*recipe.selection.exclude, *spared]}})
    found = build_plan(state.model, recipe)
    nodes = {
        name: replace(node, reason=spared[name]) if name in spared and not node.quantized else node
        for name, node in found.nodes.items()
    }
    return replace(state, plan=replace(found, nodes=nodes) if spared else found)


# Collect.


@timed("collect")
def collect(
    state: State, data: object, context: Context | None = None, *, stats: str | Path | None = None
) -> State:
    """Run the data once, or reuse what an earlier run saw of the same model and data.

    A tensor that turns out to be infinite (a mask of minus infinity, computed from the inputs) has no range:
    the nodes that make and read it stay in float, and the data runs again.

    Args:
        state: planned.
        data: whatever `roundel.data.open_samples` takes; None is fine when the plan observes nothing.
        context: hears about progress, and shares the samples with others.
        stats: a statistics file to reuse or to write.
    """
    recipe, context = state.recipe, context or Context()
    state = replace(state, few=Few())  # what came before calibration needs them no more
    if stats is not None and recipe.mode == "weight_only":
        raise RecipeError(
            "Mode weight_only gathers no statistics.",
            where=f"--stats {stats}",
            hint="Leave the statistics file out.",
        )
    spared: dict[str, str] = {}
    samples: Samples | None = None
    while True:
        requests = _requests(state)
        if data is None and not requests and not _learns(state):
            return replace(state, facts={"kind": "none needed"})
        samples = samples or open_data(state.model, recipe.data, data, state.fixed)
        try:
            return _collected(state, samples, requests, context, stats)
        except InfiniteTensorError as error:
            around = _around(state.model, error.tensors)
            if not samples.repeatable or around.keys() <= spared.keys():
                raise
            spared |= around
            state = plan(state, spared)


def _requests(state: State) -> dict[str, StatKind]:
    if state.recipe.mode != "static":
        return {}
    return dict(requests_for(state.plan, state.recipe)) or _doubtful(state.model, state.plan)


def _learns(state: State) -> bool:
    """Whether the samples themselves are learned from."""
    only = state.recipe.mode == "weight_only" and state.recipe.weight_only.algorithm == "gptq"
    return only and bool(state.plan.tensors)


def _collected(
    state: State,
    samples: Samples,
    requests: Mapping[str, StatKind],
    context: Context,
    stats: str | Path | None,
) -> State:
    context.told.step("calibrate", samples.count)
    if _learns(state):
        return _remembered(state, samples, context)
    keep = kept_samples(state.recipe, state.model)
    if stats is not None:
        return _with_file(state, samples, requests, context, Path(stats))
    # Where no range is needed, samples beyond those that are compared would run for nothing.
    idle = state.recipe.mode == "static" and not requests
    used = islice(samples, max(1, keep)) if idle else samples
    seen = observe(state.truth, requests, used, keep=keep, progress=context.told.advance, work=context.work)
    give_memory_back()
    return _with(state, seen, samples)


def _with_file(
    state: State, samples: Samples, requests: Mapping[str, StatKind], context: Context, path: Path
) -> State:
    key = fingerprint(state.model)
    saved = load_statistics(path) if path.exists() else None
    if saved is not None and saved.model_key == key and _covers(saved, requests):
        reused = _reuse(state, saved, samples, path)
        if reused is not None:
            return reused
    wanted = dict.fromkeys({**_every_activation(state.model), **requests}, _widest(requests))
    keep = kept_samples(state.recipe, state.model)
    seen = observe(state.truth, wanted, samples, keep=keep, progress=context.told.advance, work=context.work)
    save_statistics(path, seen, key)
    why = "did not exist" if saved is None else "was of another model or other data"
    return _with(state, seen, samples).noted(f"statistics file {path.name} {why}: written anew")


def _remembered(state: State, samples: Samples, context: Context) -> State:
    """All inputs, as far as memory goes, and the outputs of those that verify."""
    verified = max(1, state.recipe.verify.samples)
    inputs = KeptSamples()
    room = _KEPT_BYTES

    def watched() -> Iterator[Sample]:
        nonlocal room
        for sample in samples:
            room -= sum(array.nbytes for array in sample.values())
            if room >= 0 or len(inputs) < verified:
                inputs.append({name: array.copy() for name, array in sample.items()})
            yield sample

    seen = observe(state.truth, {}, watched(), keep=verified, progress=context.told.advance)
    give_memory_back()
    found = replace(_with(state, seen, samples), inputs=inputs)
    if len(inputs) == seen.samples_seen:
        return found
    first = f"the first {len(inputs)} of {seen.samples_seen} samples"
    return found.noted(f"{first} are learned from: more do not fit into memory")


def _with(state: State, seen: Collected, samples: Samples) -> State:
    """The state with what was seen, and what the data itself shows."""
    facts = {
        **samples.description,
        "samples_seen": seen.samples_seen,
        "samples_verified": min(state.recipe.verify.samples, len(seen.inputs)),
        "digest": seen.data_digest,
        "forward_seconds": seen.forward_seconds,
    }
    state = replace(state, stats=seen.stats, inputs=seen.inputs, outputs=seen.outputs, facts=facts)
    state = _open_outputs(state).noted(*samples.ignored)
    if samples.description.get("random"):
        return state.noted("calibrated on random data: ranges and accuracy mean nothing for real inputs")
    if not samples.inputs:
        return state
    ends = {name: (one.lows, one.highs) for name, one in seen.stats.items()}
    odd = (*samples.findings, *range_findings(ends))
    return state.noted(*(f"calibration data: {finding}" for finding in odd))


def _open_outputs(state: State) -> State:
    """Outputs that have another shape than the model declares lose it, with a note."""
    notes = []
    for name, array in (state.outputs[0] if state.outputs else {}).items():
        value = next((v for v in state.model.graph.outputs if v.name == name), None)
        if value is None or value.shape is None or _fits(value.shape, np.shape(array)):
            continue
        real = list(np.shape(array))
        notes.append(f"output '{name}' has shape {real}, not {value.shape} as declared: left open")
        value.shape = ir.Shape([None] * np.ndim(array))
    return state.noted(*notes)


def _fits(declared: ir.Shape, real: tuple[int, ...]) -> bool:
    pairs = zip(declared, real, strict=False)
    return len(declared) == len(real) and all(not isinstance(d, int) or d == r for d, r in pairs)


def _around(model: ir.Model, tensors: Collection[str]) -> dict[str, str]:
    """The nodes that make or read these tensors, each with the reason why it stays in float."""
    values = values_by_name(model.graph)
    found: dict[str, str] = {}
    for name in tensors:
        for node in (values[name].producer(), *values[name].consumers()):
            if node is not None and node.graph is model.graph:
                found.setdefault(str(node.name), f"tensor '{name}' is infinite for the calibration data")
    return found


def _covers(saved: Statistics, requests: Mapping[str, StatKind]) -> bool:
    return all(
        name in saved.stats and isinstance(saved.stats[name], OBSERVERS[kind])
        for name, kind in requests.items()
    )


def _reuse(state: State, saved: Statistics, samples: Samples, path: Path) -> State | None:
    """The saved statistics, once the data proves to be the same; only the kept samples run forward."""
    digest = SampleDigest()
    inputs = KeptSamples()
    keep = kept_samples(state.recipe, state.model)
    for sample in samples:
        digest.update(sample)
        if len(inputs) < keep:
            inputs.append({name: array.copy() for name, array in sample.items()})
    if digest.hexdigest() != saved.data_key:
        if samples.repeatable:
            return None
        raise DataError(
            "The statistics file was made from other data, and this data can be read only once.",
            where=path,
            hint="Give the new statistics another name.",
        )
    facts = {
        **samples.description,
        "samples_seen": saved.samples_seen,
        "samples_verified": min(state.recipe.verify.samples, len(inputs)),
        "digest": saved.data_key,
        "statistics": path.name,
    }
    outputs = KeptSamples(float_outputs(state.truth, inputs))
    state = replace(state, stats=saved.stats, inputs=inputs, outputs=outputs, facts=facts)
    return _open_outputs(state).noted(f"reused the statistics in {path.name}")


def float_outputs(model: ir.Model, samples: Sequence[Sample]) -> Iterator[Sample]:
    """What a float model makes of samples."""
    lanes = Lanes.of(model, len(samples))
    session = open_session(model, threads=lanes.threads)
    names = [out.name for out in session.get_outputs()]
    yield from lanes.each(lambda pair: run_session(session, names, pair[1], pair[0]), enumerate(samples))


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


# Resolve.


@timed("resolve")
def resolve(state: State) -> State:
    """From statistics to scales; in mode weight_only from weights to codes."""
    if not state.plan.tensors or state.recipe.mode == "dynamic":
        return state
    if state.recipe.mode == "weight_only":
        return replace(state, packed=_nearest(state))
    return refine(state.model, scales_of(state), state.recipe.npu)


def _nearest(state: State) -> dict[Any, Any]:
    """The weights that the plan has chosen, rounded one by one."""
    options, packed = state.recipe.weight_only, {}
    for layer in weight_layers(state.model.graph, state.plan.nodes):
        if layer.key not in packed:
            array = constant_array(state.model.graph.initializers[layer.weight])
            assert array is not None
            search = options.range == "mse"
            packed[layer.key] = round_packed(layer.matrix(array), options.scheme, search=search)
    return packed


# Write.


@timed("write")
def write(state: State) -> State:
    """The quantized graph."""
    if not state.plan.tensors and state.recipe.mode != "dynamic":
        done = replace(state, written=state.model.clone()).noted(NOTHING)
    else:
        done = _WRITERS[state.recipe.mode](state)
    assert done.written is not None
    done.written.producer_name, done.written.producer_version = "roundel", VERSION
    return done.noted(*float_part_notes(done.plan.nodes))


def _write_static(state: State) -> State:
    written = write_qdq(state.model, state, state.recipe)
    share_codes(written.graph)
    simulated = simulate(written, state, state.recipe.npu)
    notes = (f"{what}: {count} nodes" for what, count in simulated.items())
    return replace(state, written=written).noted(*notes)


def _write_dynamic(state: State) -> State:
    """Activations are measured at run time; the plan says which nodes were left as they were after all."""
    nodes = state.plan.nodes
    chosen = frozenset(n.name for n in nodes.values() if n.quantized)
    written, count = write_dynamic(state.model, state.recipe, chosen)
    left = {str(node.name) for node in written.graph} & chosen
    reason = "its weight is computed, or of a form without an integer operator"
    nodes = {
        n.name: replace(n, quantized=False, reason=reason) if n.name in left else n for n in nodes.values()
    }
    done = replace(state.plan, nodes=nodes, tensors=state.plan.tensors if count else {})
    note = f"{count} nodes quantize their input at run time" if count else NOTHING
    return replace(state, written=written, plan=done).noted(note)


def _write_weights(state: State) -> State:
    """The matrices in few bits, all else as it was."""
    options = state.recipe.weight_only
    layers = weight_layers(state.model.graph, state.plan.nodes)
    written = write_weights(state.model, layers, state.packed, options)
    sizes = ", ".join(f"{weight_bytes(m) / 1e6:.1f} MB" for m in (state.model, written))
    note = f"{len(state.packed)} weights in {options.bits} bits; constants before and after: {sizes}"
    return replace(state, written=written).noted(note)


_WRITERS: Mapping[str, Callable[[State], State]] = {
    "static": _write_static,
    "dynamic": _write_dynamic,
    "weight_only": _write_weights,
}
