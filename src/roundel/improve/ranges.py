"""Ranges by what they do to the model's output, where the tensor's own histogram chooses badly.

A tensor's own error counts every channel alike; the layers behind it do not. So each tensor is quantized
alone, all else in float, and the few whose error at the output stands out try narrower and wider ranges.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from roundel.calibrate.resolve import resolve as scales_of
from roundel.improve.probe import QuantizerProbe
from roundel.numerics.affine import bias_params, dequantize, round_scale
from roundel.numerics.metrics import Closeness
from roundel.plan.types import Derived, Fixed, Role
from roundel.state import LayerReport, State
from roundel.types import Listener, QParams, Sample, ScaleKind

_BITS = 8  # with more, all that a narrower range changes is what happens to values that no sample showed
_RUNS_A_SAMPLE = 0.6  # forward runs that looking at every tensor may take, for each sample there is
_RUNS, _FEWEST_RUNS, _LEAST_RUNS = 240, 24, 8
_RUN_ELEMENTS = 12_000_000  # for a big model, fewer runs must do: 8 with images of 1024 x 512
_LEAST_LOOKED, _LOOKED = 1, 4  # samples that a tensor is looked at with
_GLANCE = 2  # samples that tell whether a direction is worth a try at all
_HOPELESS = 1.5  # times the error on them
_MEASURED = 8  # samples that confirm a range; held-out ones judge in the end
_TRIED_ELEMENTS = 1_200_000  # of the samples that a range is first tried on: 16 images of 224 x 224
_WORTH = 0.1  # share of the whole error that makes a tensor worth a search
_MOST = 12  # tensors that are searched
_LEAST_PATIENCE, _PATIENCE = 2, 2  # of them in a row, the worst first, that stay: the rest will, too
_GAIN = 0.95  # a step must leave less than this share of the error
_CLEAR_GAIN = 0.8  # and another choice for all tensors at once, less than this
_FEW_SAMPLES = 32
_STEPS = 4
_FACTORS = {ScaleKind.POWER_OF_TWO: 0.5}
_FACTOR = 0.8


def probe_of(state: State, samples: Sequence[Sample], outputs: Sequence[Sample]) -> QuantizerProbe | None:
    """A probe of the ranges that may move; None where none may.

    Args:
        state: calibrated.
        samples, outputs: inputs that may be learned from, and the float model's outputs for them.
    """
    groups = _searched(state)
    if not groups or not samples:
        return None
    return QuantizerProbe(state.model, state, groups, state.recipe, samples, outputs)


Scales = Mapping[str, NDArray[np.float32]]


def as_wide_as_seen(state: State, probe: QuantizerProbe) -> State:
    """With all ranges of activations as wide as what calibration saw, where that is clearly better.

    A few samples show little of a tensor's tails: what seems best for them cuts off other samples' values.

    Args:
        state: calibrated by the squared error.
        probe: of its ranges.
    """
    groups = _searched(state)
    if probe.samples > _FEW_SAMPLES:
        return state
    wide = scales_of(replace(state, recipe=state.recipe.merged({"calibration": {"method": "minmax"}}))).params
    scales = {n[0]: wide[n[0]].scale for n in groups if _only_wider(state.params[n[0]], wide[n[0]])}
    if not scales:
        return state
    count = _tried(probe.size)
    usual = {names[0]: state.params[names[0]].scale for names in groups}
    now, then = probe.error(usual, count), probe.error({**usual, **scales}, count)
    if not then.noise < _CLEAR_GAIN * now.noise:
        return state
    moved = {name: names[0] for names in groups for name in names if names[0] in scales}
    return with_params(
        state, {n: replace(state.params[n], scale=scales[first]) for n, first in moved.items()}
    )


def _only_wider(now: QParams, then: QParams) -> bool:
    return np.array_equal(now.zero_point, then.zero_point) and not np.array_equal(now.scale, then.scale)


def _searched(state: State) -> list[tuple[str, ...]]:
    return [names for names in movable(state) if state.params[names[0]].qtype.bits <= _BITS]


def _tried(size: int) -> int:
    return _at_most(_MEASURED, 1, _TRIED_ELEMENTS // size)


def choose_ranges(
    state: State, probe: QuantizerProbe, progress: Listener | None = None
) -> tuple[State, tuple[LayerReport, ...]]:
    """Widen or narrow the ranges of activations where the model's outputs gain.

    Args:
        state: calibrated; limits of the target are applied afterwards.
        probe: of its ranges; it may have been made when they were others.
        progress: told the number of tensors, and how many are done.
    """
    groups = _searched(state)
    if progress is not None:
        progress.step("look at each tensor's error", len(groups))
    fewest = _at_most(_FEWEST_RUNS, _LEAST_RUNS, _RUN_ELEMENTS // probe.size)
    runs = _at_most(_RUNS, fewest, int(_RUNS_A_SAMPLE * probe.samples))
    scales = {names[0]: state.params[names[0]].scale for names in groups}
    noise, total = noise_alone(probe, scales, runs, progress)
    least = max(_WORTH * total, *sorted(noise)[-_MOST - 1 : -_MOST], 0.0)
    moved: dict[str, QParams] = {}
    reports: list[LayerReport] = []
    tried = _tried(probe.size)
    patience = _at_most(_PATIENCE, _LEAST_PATIENCE, tried)
    worst = sorted((i for i in range(len(groups)) if noise[i] > least), key=lambda i: -noise[i])
    for index in worst:
        if len(reports) >= patience and not any(report.kept for report in reports[-patience:]):
            break
        names = groups[index]
        start = time.perf_counter()
        kind = state.plan.tensors[names[0]].integer.scale
        found = _search(probe, names[0], state.params[names[0]].scale, kind, tried)
        for name in names if found.moved else ():
            moved[name] = replace(state.params[name], scale=found.scale)
        took = time.perf_counter() - start
        reports.append(LayerReport(names[0], "range", *found.decibels, found.moved, took))
    return with_params(state, moved) if moved else state, tuple(reports)


def _at_most(most: int, least: int, wanted: int) -> int:
    return min(most, max(least, wanted))


def noise_alone(
    probe: QuantizerProbe,
    scales: Scales,
    runs: int,
    progress: Listener | None,
    least: float | None = None,
) -> tuple[list[float], float]:
    """What quantizing each group alone does to the outputs, and the sum of it all.

    A run takes time by the size of the model. Where there are more groups than runs for them, neighbours are
    looked at together first; then the worst bundle is halved, again and again, while there are runs. What is
    not in one half is in the other: noise adds up. A bundle with less noise than `least` (a share of the sum
    when not given) is not halved, and its groups count as silent. Noise counts relative to the signal.
    """
    groups, many = list(scales), len(scales)
    few = _at_most(_LOOKED, _LEAST_LOOKED, runs // many)

    def joint(some: Sequence[str]) -> float:
        close = probe.error({name: scales[name] for name in some}, few)
        return close.noise / close.signal if close.signal > 0 else close.noise

    noise = [0.0] * many
    size = -(-2 * many * few // runs) if many * few > runs else 1  # half of the runs for the bundles
    heap: list[tuple[float, int, int]] = []
    for first in range(0, many, size):
        behind = min(first + size, many)
        heap.append((-joint(groups[first:behind]), first, behind))
        if progress is not None:
            progress.advance(behind)
    total, left = -sum(entry[0] for entry in heap), runs // few - len(heap)
    heapq.heapify(heap)
    while heap:
        negative, first, behind = heapq.heappop(heap)
        if behind - first == 1:
            noise[first] = -negative
        elif left > 0 and -negative > (_WORTH * total if least is None else least):
            left, middle = left - 1, (first + behind) // 2
            half = min(joint(groups[first:middle]), -negative)
            heapq.heappush(heap, (-half, first, middle))
            heapq.heappush(heap, (negative + half, middle, behind))
    return noise, total


def movable(state: State) -> list[tuple[str, ...]]:
    """Activations whose range calibration chose, those with one scale together."""
    members: dict[tuple[str, ...], list[str]] = {}
    for name, tensor in state.plan.tensors.items():
        if tensor.role is Role.ACTIVATION and state.plan.in_integers(name):
            members.setdefault(state.plan.leaders(name), []).append(name)
    return [tuple(names) for leaders, names in members.items() if not any(_given(state, x) for x in leaders)]


def _given(state: State, leader: str) -> bool:
    tensor = state.plan.tensors.get(leader)
    return tensor is not None and (isinstance(tensor.source, Fixed) or tensor.role is not Role.ACTIVATION)


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    scale: NDArray[np.float32]
    moved: bool
    decibels: tuple[float, float]


def _search(
    probe: QuantizerProbe, group: str, scale: NDArray[np.float32], kind: ScaleKind, count: int
) -> _Found:
    """Downhill in the better direction, while it pays on a few samples, and then on more."""
    factor, more = _FACTORS.get(kind, _FACTOR), min(_MEASURED, 2 * count)

    @cache  # both directions start alike, and without more samples the second stage repeats the first
    def error(tried: float, samples: int) -> Closeness:
        return probe.error({group: np.asarray(tried, np.float32)}, samples)

    def downhill(
        start: NDArray[np.float32], step: float, samples: int
    ) -> tuple[NDArray[np.float32], Closeness]:
        chosen, best = start, error(float(start), samples)
        for _ in range(_STEPS):
            tried = round_scale(float(chosen) * step, kind)
            result = error(float(tried), samples)
            if not result.noise < _GAIN * best.noise:
                break
            chosen, best = tried, result
        return chosen, best

    glance = min(count, _GLANCE)
    ends = {step: float(round_scale(float(scale) * step, kind)) for step in (factor, 1 / factor)}
    most = _HOPELESS * error(float(scale), glance).noise
    steps = [step for step, tried in ends.items() if error(tried, glance).noise < most]
    if not steps:
        decibels = error(float(scale), glance).sqnr_db
        return _Found(scale, False, (decibels, decibels))
    both = [downhill(scale, step, count) for step in steps]
    (chosen, best), step = min(zip(both, steps, strict=True), key=lambda pair: pair[0][1].noise)
    if chosen is not scale:
        first = error(float(scale), more)
        chosen, best = downhill(chosen, step, more)
        if best.noise < _GAIN * first.noise:
            return _Found(chosen, True, (first.sqnr_db, best.sqnr_db))
        best = first
    return _Found(scale, False, (best.sqnr_db, best.sqnr_db))


def with_params(state: State, moved: Mapping[str, QParams]) -> State:
    """The state with other activation scales; biases that follow from them follow, and keep their values."""
    params, codes, values = {**state.params, **moved}, dict(state.codes), dict(state.values)
    for name, tensor in state.plan.tensors.items():
        source = tensor.source
        if isinstance(source, Derived) and source.input in moved:
            derived = bias_params(params[source.input].scale, params[source.weight], source.factor)
            if name in codes:
                values[name] = dequantize(codes.pop(name), params[name])
            params[name] = replace(params[name], scale=np.resize(derived.scale, params[name].scale.shape))
    return replace(state, params=params, codes=codes, values=values)
