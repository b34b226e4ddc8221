"""All that is tried on the way to a quantized model, in order: a new algorithm is an entry here."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from roundel.calibrate.positions import refine
from roundel.data import Samples
from roundel.errors import DataError
from roundel.improve import judges
from roundel.improve.activations import bend, find_choices, find_gates
from roundel.improve.biases import correct_biases, find_shifts
from roundel.improve.equalize import equalize
from roundel.improve.finetune import finetune
from roundel.improve.memory import once, run_key
from roundel.improve.mixed import mix_layers
from roundel.improve.outputs import look_at_outputs
from roundel.improve.probe import QuantizerProbe
from roundel.improve.ranges import as_wide_as_seen, choose_ranges, probe_of
from roundel.improve.rotate import rotate
from roundel.improve.rounding import choose_rounding
from roundel.improve.smooth import find_groups, look_at_channels, smooth
from roundel.improve.weight_only import gptq_layers
from roundel.improve.widths import takes_sixteen, widen
from roundel.model.graph import is_op, weight_bytes
from roundel.model.session import Lanes
from roundel.passes import refresh_shapes
from roundel.plan import build_plan
from roundel.plan.build import weight_layers
from roundel.stages import float_outputs, most_samples, open_data
from roundel.state import (
    FEWEST,
    NUMBERS,
    Context,
    Few,
    LayerReport,
    Layers,
    State,
    StepReport,
    held_out_count,
)
from roundel.types import Scheme
from roundel.work.checkpoints import Memory

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
Judge = Callable[[State], Iterable[float]]
_ROUNDING, _WIDE = "rounding", "16 bits"
_SELDOM_NOTHING = frozenset({_ROUNDING, "fine-tuning"})  # what the state was worth before is asked meanwhile
_FEWEST_DRAWS = 2
_LARGE = 100_000_000  # bytes of weights
_LOOKED_AT = 6  # samples that say what the inputs of activations are like
_CLEAR = 1.5  # dB between two verdicts
_DOUBT = 0.5  # of the standard error of several draws


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to try.

    Attributes:
        name: for people, in the record and in the times.
        applies: whether the recipe asks for it and the model and the data have what it needs.
        run: the state as it would have it.
        judge: how good a state is, in dB, by one draw or several; None where the step itself reaches what
            the user asked for.
    """

    name: str
    applies: Callable[[State], bool]
    run: Callable[[State, Context], State]
    judge: Judge | None


def keep_if_better(step: Step, state: State, context: Context) -> State:
    """The state with the step where an error on unseen samples falls by it, else without it."""
    if not step.applies(state):
        return state
    start = time.perf_counter()
    judge = _judge(step, state)
    # Of a large model, one copy at a time.
    at_once = Lanes.of(state.model, 2).count if weight_bytes(state.model) < _LARGE else 1
    with ThreadPoolExecutor(at_once) as pool:
        beside = None
        if judge is not None and step.name in _SELDOM_NOTHING and at_once > 1 and not _knows(judge, state):
            beside = pool.submit(_in_context(list), judge(state))
        tried = step.run(state, context)
        story, layers = tried.said, tried.layers
        nothing = tried.same_as(state)
        tried = replace(tried, said="", layers=())
        if story:
            state, tried = state.noted(f"{step.name}: {story}"), tried.noted(f"{step.name}: {story}")
        if judge is None:
            return tried.spent(step.name, time.perf_counter() - start)
        if nothing:
            return replace(state, judged=tried.judged).spent(step.name, time.perf_counter() - start)
        if _knows(judge, state):
            assert state.judged is not None
            errors, doubt = (state.judged[1], _mean(list(judge(tried)))), 0.0
        else:
            before = judge(state) if beside is None else beside.result()
            errors, doubt = _compared(iter(before), iter(judge(tried)), pool)
    took = time.perf_counter() - start
    early = judge in (judges.ahead_of_rounding, judges.equalization)
    foreseen = early and state.recipe.improve.rounding
    report = verdict(step.name, errors, took, layers, doubt=doubt, foreseen=foreseen)
    chosen = tried if report.kept else state
    done = replace(chosen, judged=(judge, report.after_db), steps=(*state.steps, report))
    return done.spent(step.name, took)


def _next(draws: Iterator[float]) -> float | None:
    return next(draws, None)


def _in_context(work: Callable[[_Item], _Result]) -> Callable[[_Item], _Result]:
    """The same for another thread, with this one's memory budget."""
    context = copy_context()
    return lambda item: context.run(work, item)


def _knows(judge: Judge, state: State) -> bool:
    return state.judged is not None and state.judged[0] is judge


def _compared(
    before: Iterator[float], after: Iterator[float], pool: ThreadPoolExecutor
) -> tuple[tuple[float, float], float]:
    """Both verdicts, and the gain that chance alone may show.

    A judge of several draws stops when two agree and leave no doubt. One draw alone may be 6 dB off.
    """
    draws: list[tuple[float, float]] = []
    gains: list[float] = []
    while len(gains) < _FEWEST_DRAWS or not _agree(gains):
        asked = [pool.submit(_in_context(_next), side) for side in (before, after)]
        first, second = (future.result() for future in asked)
        if first is None or second is None:
            break
        draws.append((first, second))
        gains.append(second - first)
    doubt = _DOUBT * float(np.std(gains, ddof=1)) / len(gains) ** 0.5 if len(gains) > 1 else 0.0
    now, then = (_mean(side) for side in zip(*draws, strict=True))
    return (now, then), doubt if np.isfinite(doubt) else 0.0


def _agree(gains: Sequence[float]) -> bool:
    return min(map(abs, gains)) > _CLEAR and len(set(map(np.sign, gains))) == 1


def _mean(decibels: Sequence[float]) -> float:
    return sum(decibels) / len(decibels)  # infinities of both signs make nan, which never wins


def verdict(
    step: str,
    errors: tuple[float, float],
    seconds: float,
    layers: Layers = (),
    *,
    doubt: float = 0.0,
    foreseen: bool = False,
) -> StepReport:
    """A step is kept where the SQNR with it (the second number) is clearly higher than without it."""
    before, tried = errors
    if tried > before + doubt:
        return StepReport(step, before, tried, True, seconds, layers, foreseen=foreseen)
    return StepReport(step, before, before, False, seconds, layers, refused_db=tried, foreseen=foreseen)


def _judge(step: Step, state: State) -> Judge | None:
    """Before rounding, weights count as it will leave them."""
    if step.judge is not judges.unseen or step.name == _ROUNDING:
        return step.judge
    ahead = state.recipe.improve.rounding and not _ran(_ROUNDING, state)
    return judges.ahead_of_rounding if ahead else step.judge


# Steps that change the float graph, exactly: tried on a few samples, before anything is calibrated.


def take_few(state: State, samples: Samples | None) -> State:
    """The samples that the graph steps need, and the float model's outputs for those that judge."""
    wanted = [step for step in GRAPH_STEPS if _wants(step.name, state)]
    outliers = [step.name for step in wanted if step.name not in _FROM_FEW]
    if not wanted or (samples is None and not outliers):
        return state
    if samples is None:  # what a user asks for is not left out in silence
        samples = open_data(state.model, state.recipe.data, None)
    start = time.perf_counter()
    most = most_samples(state.recipe, state.model)
    kept = min(state.recipe.improve.samples, max(state.recipe.verify.samples, most))
    inputs = samples.first(most if outliers else kept)
    if len(inputs) < FEWEST:
        note = f"{' and '.join(outliers)} need{'s' * (len(outliers) == 1)} {FEWEST} samples or more: left out"
        return state.noted(*([note] if outliers else []))
    numbers: set[int] = set()
    if len(wanted) > len(outliers):
        numbers |= {*judges.spread_evenly(state.model.graph, inputs)}
    if outliers:
        numbers |= {*range(len(inputs) - held_out_count(len(inputs)), len(inputs))}
    some = sorted(numbers)
    outputs = float_outputs(state.model, [inputs[n] for n in some])
    state = replace(state, few=Few(inputs, dict(zip(some, outputs, strict=True))))
    return state.spent("first samples", time.perf_counter() - start)


_ROTATION, _SMOOTHING, _EQUALIZATION = "rotation", "smoothing", "equalization"
_ACTIVATIONS = "activations"
_FROM_FEW = (_EQUALIZATION, _ACTIVATIONS)  # judged by the samples that they were chosen with


def _wants(name: str, state: State) -> bool:
    recipe = state.recipe
    options: Mapping[str, bool] = {
        _ROTATION: recipe.improve.rotate.enabled,
        _SMOOTHING: recipe.improve.smooth.enabled,
        _EQUALIZATION: recipe.improve.equalize.enabled,
        _ACTIVATIONS: recipe.improve.activations and _has_straight_gates(state),
    }
    usual = name not in _FROM_FEW or (recipe.effort != "none" and recipe.mode == "static")
    return options[name] and usual


def _has_straight_gates(state: State) -> bool:
    swapped = state.recipe.npu.sigmoid_to_hard_sigmoid
    return swapped and any(is_op(node, "Sigmoid") for node in state.model.graph)


def _can(name: str) -> Callable[[State], bool]:
    return lambda state: _wants(name, state) and len(state.few.inputs) >= FEWEST


def _rotated(state: State, context: Context) -> State:
    """Before smoothing: it folds the scales of the norms into the layers, and would undo that."""
    context.told.step("rotate")
    model = state.model.clone()
    reports = rotate(model, state.recipe.improve.rotate)
    turned, left = ([r for r in reports if r.kept is kept] for kept in (True, False))
    told = [
        f"stream '{r.tensor}', {r.width} wide, {r.norms} norms, {r.layers} layers: {r.where}" for r in turned
    ]
    if left:
        several = f"; {len(left) - 1} more likewise" if len(left) > 1 else ""
        told.append(f"stream '{left[0].tensor}' stays as it is: {left[0].where}{several}")
    said = "; ".join(told) or "no norm over the last axis was found, so there is no residual stream"
    if not turned:
        return replace(state, said=said)
    refresh_shapes(model)
    return replace(state, model=model, said=said)


def _smoothed(state: State, context: Context) -> State:
    context.told.step("smooth")
    model, recipe = state.model.clone(), state.recipe
    first = judges.first_held(state)
    plan = build_plan(model, recipe)
    groups = find_groups(model.graph, plan)
    inputs = state.few.inputs
    seen = look_at_channels(model, groups, inputs[:first], inputs[first:]) if groups else {}
    reports = smooth(model, groups, seen, plan, recipe)
    places = Counter(report.where for report in reports)
    told = ", ".join(f"{count} x {where}" for where, count in places.most_common())
    said = f"{len(reports)} tensors before layers: {told}" if told else "no quantized MatMul or Gemm found"
    if not any(report.kept for report in reports):
        return replace(state, said=said)
    refresh_shapes(model)
    layers = tuple(layer for report in reports for layer in report.layers)
    return replace(state, model=model, said=said, layers=layers)


def _equalized(state: State, context: Context) -> State:
    context.told.step("try equalization")
    model = state.model.clone()
    done = equalize(
        model, state.recipe.improve.equalize, power_of_two=state.recipe.weights.scale == "power_of_two"
    )
    if not done.layers:
        return state
    return replace(state, model=model, rewrites={**state.rewrites, "equalize": done.channels})


def _bent(state: State, context: Context) -> State:
    """Behind equalization, whose factors stop at these gates."""
    context.told.step("fit activations")
    gates = find_gates(state.model.graph, build_plan(state.model, state.recipe), state.recipe.npu)
    choices = find_choices(state.model, gates, state.few.inputs[:_LOOKED_AT]) if gates else None
    if choices is None or not choices.ways:
        return state
    states = [_with_gates(state, *bend(state.model, gates, way)) for way in choices.ways]
    errors = [_mean(list(judges.straightened(tried))) for tried in states] if len(states) > 1 else [0.0]
    best = int(np.argmax(errors))
    slopes = [float(way.slope) for way in choices.ways[best].values() if not way.slope.ndim]
    told = [f"slope {min(slopes):.2f} to {max(slopes):.2f} for {len(slopes)} SiLU"] if slopes else []
    if alone := len(choices.ways[best]) - len(slopes):
        told.append(f"slope and shift for {alone} gate{'s' * (alone > 1)}")
    said = f"HardSigmoid takes the place of Sigmoid: {', '.join(told)}"
    return replace(states[best], said=said)


def _with_gates(state: State, model: ir.Model, reference: ir.Model) -> State:
    refresh_shapes(model)
    refresh_shapes(reference)
    return replace(state, model=model, reference=reference)


GRAPH_STEPS = (
    Step(_ROTATION, _can(_ROTATION), _rotated, judges.outliers),
    Step(_SMOOTHING, _can(_SMOOTHING), _smoothed, judges.outliers),
    Step(_EQUALIZATION, _can(_EQUALIZATION), _equalized, judges.equalization),
    Step(_ACTIVATIONS, _can(_ACTIVATIONS), _bent, judges.straightened),
)


# Steps that choose numbers for a plan, behind calibration.


def too_few(state: State) -> State:
    """With a note where there are too few samples to try anything."""
    recipe, count = state.recipe, len(judges.to_learn(state)[0])
    if not state.plan.tensors or recipe.mode != "static" or recipe.effort == "none" or count >= FEWEST:
        return state
    tunes = recipe.improve.ranges or recipe.improve.rounding or recipe.finetuning != "none"
    if not tunes and not any(find_shifts(state.model.graph, state.plan)):
        return state
    return state.noted(
        f"{recipe.effort} effort wins back part of what the format costs, but needs {FEWEST} samples for it"
        f" and had {count or 'none'}"
    )


def _learns(state: State) -> bool:
    """Whether there is something to improve, and samples to learn it from."""
    usual = state.recipe.mode == "static" and state.recipe.effort != "none" and bool(state.plan.tensors)
    return usual and len(judges.to_learn(state)[0]) >= FEWEST


def _has_goal(state: State) -> bool:
    recipe = state.recipe
    return _learns(state) and recipe.improve.goal > 0 and isinstance(recipe.activations.scheme, Scheme)


def _ran(step: str, state: State) -> bool:
    """Whether a step had something to say, kept or not."""
    return any(report.step == step for report in state.steps)


def _mixed(state: State, context: Context) -> State:
    return mix_layers(state, context.told)


def _widths(state: State, context: Context) -> State:
    return widen(state, context.told)


def _looked(state: State, context: Context) -> State:
    return look_at_outputs(state, context.told)


def _moved(state: State) -> bool:
    """Whether a step was kept on a forecast of what rounding would leave."""
    return _learns(state) and any(step.kept and step.foreseen for step in _behind_calibration(state))


def _behind_calibration(state: State) -> list[StepReport]:
    early = {step.name for step in GRAPH_STEPS}
    return [report for report in state.steps if report.step not in early]


def _back(state: State, context: Context) -> State:
    plain: State = context.kept["calibrated"]
    return replace(state, **{name: getattr(plain, name) for name in NUMBERS})


def _widened(state: State, context: Context) -> State:
    context.told.step("try wider ranges")
    probe = _range_probe(state, context)
    found = state if probe is None else as_wide_as_seen(state, probe)
    return found if found is state else refine(state.model, found, state.recipe.npu)


def _ranges(state: State, context: Context) -> State:
    probe = _range_probe(state, context)
    del context.kept["probe"]
    if probe is None:
        return state

    def work(now: State) -> tuple[State, tuple[LayerReport, ...]]:
        found, tensors = choose_ranges(now, probe, progress=context.told)
        return found if found is now else refine(state.model, found, state.recipe.npu), tensors

    found, layers = once(_memory("ranges", state, context), state, work)
    return replace(found, layers=layers)


def _range_probe(state: State, context: Context) -> QuantizerProbe | None:
    """One for both steps: to open it takes longer than most of what it is asked."""
    inputs, outputs = judges.to_learn(state)
    held = held_out_count(len(inputs))
    if "probe" not in context.kept:
        context.kept["probe"] = probe_of(state, inputs[:-held], outputs[:-held])
    found: QuantizerProbe | None = context.kept["probe"]
    return found


def _corrected(state: State, context: Context) -> State:
    inputs = judges.to_learn(state)[0]

    def work(now: State) -> tuple[State, tuple[LayerReport, ...]]:
        return correct_biases(state.model, now, inputs, state.recipe, progress=context.told)

    found, layers = once(_memory("biases", state, context), state, work)
    return replace(found, layers=layers)


def _rounded(state: State, context: Context) -> State:
    inputs, memory = judges.to_learn(state)[0], _memory("rounding", state, context)
    found, layers = choose_rounding(
        state.model, state, inputs, state.recipe, progress=context.told, memory=memory
    )
    return replace(found, layers=layers)


def _tuned(state: State, context: Context) -> State:
    inputs, memory = judges.to_learn(state)[0], _memory("finetune", state, context)
    found, layers = finetune(state.model, state, inputs, state.recipe, progress=context.told, memory=memory)
    return replace(found, layers=layers)


def _packed(state: State, context: Context) -> State:
    """GPTQ for weights in few bits.

    Raises:
        DataError: there are too few samples.
    """
    if len(state.inputs) < FEWEST:
        raise DataError(
            "GPTQ needs more samples.",
            where="weight_only.algorithm: gptq",
            observed=f"{len(state.inputs)} samples",
            expected=f"at least {FEWEST}, and 100 are usual: the last fifth judges what the others taught",
        )
    layers = weight_layers(state.model.graph, state.plan.nodes)
    packed, reports = gptq_layers(
        state.model, layers, state.packed, state.inputs, state.recipe.weight_only, context.told
    )
    return replace(state, packed=packed, layers=reports)


def _memory(step: str, state: State, context: Context) -> Memory | None:
    if context.work.store is None:
        return None
    key = run_key(state.model, state, judges.to_learn(state)[0], state.recipe)
    return context.work.store.memory(step, key)


# Before resolve: another plan for the same statistics.
PLAN_STEPS = (Step("mixed precision", lambda s: s.recipe.mixed.searched, _mixed, None),)

STATE_STEPS = (
    Step(_WIDE, lambda s: _has_goal(s) and takes_sixteen(s), _widths, judges.unseen),
    Step(
        "wider ranges",
        lambda s: _learns(s) and s.recipe.improve.ranges and s.recipe.calibration.method == "mse",
        _widened,
        judges.unseen,
    ),
    Step("ranges", lambda s: _learns(s) and s.recipe.improve.ranges, _ranges, judges.unseen),
    # Before rounding, which makes up in integer layers for what is still missing behind these.
    Step(
        "bias correction",
        lambda s: _learns(s) and any(find_shifts(s.model.graph, s.plan)),
        _corrected,
        judges.unseen,
    ),
    Step(_ROUNDING, lambda s: _learns(s) and s.recipe.improve.rounding, _rounded, judges.unseen),
    Step("fine-tuning", lambda s: _learns(s) and s.recipe.finetuning != "none", _tuned, judges.unseen),
    # Steps before rounding are judged by what it will about leave; this asks what it did leave.
    Step("calibration alone", _moved, _back, judges.unseen),
    Step("outputs", _has_goal, _looked, None),
    Step(
        "gptq",
        lambda s: (
            s.recipe.weight_only.algorithm == "gptq" and s.recipe.mode == "weight_only" and bool(s.packed)
        ),
        _packed,
        judges.held_out_packed,
    ),
)
