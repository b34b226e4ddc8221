"""Sixteen bits for the few activations that spoil an output: found by measurement, kept where they help.

Outliers of a transformer's residual stream leave its other channels hardly a code, and a network may have
such a tensor anywhere. Each tensor is quantized alone, all else in float; the noisiest take int16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from roundel.calibrate.resolve import resolve as scales_of
from roundel.improve.judges import ahead_of_rounding, as_if_rounded, to_learn, unseen
from roundel.improve.probe import Judged, QuantizerProbe, run_size, together
from roundel.improve.probe import judged as quantized
from roundel.improve.ranges import movable, noise_alone, with_params
from roundel.model.graph import values_by_name
from roundel.numerics.metrics import Closeness
from roundel.plain import listed
from roundel.plan.stream import is_transformer, stream_tensors
from roundel.plan.types import Role
from roundel.state import State, held_out_count
from roundel.types import Listener, QParams, QType, Sample, ScaleKind, Scheme

AHEAD_DB = 3.0  # rounding, which follows, may still cost as much
_BEYOND_DB = 6.0  # activations alone must do better than the goal: weights add their noise
_SHARE = 0.15  # of the activations: the NPU takes longer for wide ones
_FEWEST = 4  # which a small model may have all the same
_ROOM = 2.0  # for values that no sample showed: one bit of sixteen
_SPLIT = 1 / 8  # of the noise that may stay: bundles below it are not looked into
_BLAME = 0.5  # of the whole noise, which activations alone must make: else the weights are to blame
_LOST = 0.25  # noise over signal of a sample from which it says little
_SEEN, _LOOKED = 16, 2  # samples among which telling ones are sought, and how many of those are looked at
_RUNS, _LEAST_RUNS, _RUN_ELEMENTS = 96, 16, 12_000_000  # of the probe, fewer for a big model
_NAMED = 3


@dataclass(frozen=True, slots=True)
class HeldErrors:
    """How far a quantized model is off on samples that no step has learned from.

    Attributes:
        whole: all outputs together, as the judges count them.
        each: SQNR in dB of each output, or part of one.
    """

    whole: float
    each: Mapping[str, float]

    @property
    def worst(self) -> tuple[str, float]:
        """The output that is furthest off; infinitely good where nothing can be compared."""
        return min(self.each.items(), key=lambda pair: pair[1], default=("", float("inf")))


def held_errors(state: State, judged: State) -> HeldErrors:
    """The errors of the model that one state gives, with the samples of another."""
    inputs, outputs = to_learn(state)
    held = held_out_count(len(inputs))
    ready = Judged(quantized(state.model, judged, state.recipe), state.model, held)
    found = list(ready.errors(inputs[-held:], outputs[-held:]))
    each: dict[str, Closeness] = {}
    for errors in found:
        for name, close in errors.items():
            each[name] = each.get(name, Closeness()).merge(close)
    return HeldErrors(together(found).sqnr_db, {name: close.sqnr_db for name, close in each.items()})


def takes_sixteen(state: State) -> bool:
    """Whether single activations may have 16 bits: all have 8, with scales of any size."""
    scheme = state.recipe.activations.scheme
    floating = isinstance(scheme, Scheme) and scheme.scale is ScaleKind.FLOAT
    return floating and state.recipe.activations.type in ("int8", "uint8")


def goal_of(state: State) -> float:
    """What each output should reach, in dB."""
    improve = state.recipe.improve
    if not is_transformer(state.model.graph, state.plan.nodes):
        return improve.goal
    return max(improve.goal, improve.transformer_goal) if improve.goal else 0.0


def widen(state: State, told: Listener) -> State:
    """The state with 16 bits for the activations that keep outputs below the goal.

    Args:
        state: resolved; rounding, which makes up for the errors that are there, has yet to come.
        told: hears about progress.
    """
    told.step("look at each output")
    early, goal = state.recipe.improve.rounding, goal_of(state)
    errors = held_errors(state, as_if_rounded(state.model.graph, state) if early else state)
    measured = replace(state, judged=(ahead_of_rounding if early else unseen, errors.whole))
    worst, reached = errors.worst
    if reached >= goal + (AHEAD_DB if early else 0.0) or _room(state) <= 0:
        return measured
    allowed = 10 ** (-(goal + _BEYOND_DB) / 10) / len(errors.each)
    chosen = _noisiest(state, errors.whole, allowed, told)
    if not chosen:
        return measured
    wide = _in_sixteen(state, chosen)
    count, among = len(_wide(wide)), len(_activations(wide))
    names = listed([f"'{name}'" for name in chosen], _NAMED)
    return wide.noted(
        f"{count} of {among} activations are stored in 16 bits ({names}): in 8 bits they would leave output"
        f" '{worst}' at {reached:.1f} dB (-s improve.goal=0 keeps all in 8)"
    )


def _noisiest(state: State, reached: float, allowed: float, told: Listener) -> list[str]:
    """The groups of activations, by their first tensor, without which noise over signal may be that small.

    The stream comes first: where it is enough, nothing else is looked at.
    """
    inputs, outputs = to_learn(state)
    held = held_out_count(len(inputs))
    groups = {names[0]: names for names in movable(state) if _narrow(state, names[0])}
    samples = _telling(state, inputs[:-held], outputs[:-held])
    probe = QuantizerProbe(state.model, state, list(groups.values()), state.recipe, *samples)
    room = _room(state)
    runs = min(_RUNS, max(_LEAST_RUNS, _RUN_ELEMENTS // run_size(state.model.graph, inputs[0])))
    stream = stream_tensors(state.model.graph)
    first = [name for name, names in groups.items() if not stream.isdisjoint(names)]
    chosen: list[str] = []
    for pool in (first, [name for name in groups if name not in first]):
        told.step("look for what spoils the outputs", len(pool))
        if not pool:
            continue
        rest = [name for name in groups if name not in chosen]
        alone = _relative(probe.error(dict.fromkeys(rest), _LOOKED))
        if alone <= max(allowed, _BLAME * 10 ** (-reached / 10)):
            break  # the weights' fault
        noise, _ = noise_alone(probe, {n: state.params[n].scale for n in pool}, runs, told, allowed * _SPLIT)
        ranked = sorted(zip(noise, pool, strict=True), key=lambda pair: -pair[0])
        left = sum(noise)
        for one, name in ranked:
            if one <= 0 or left <= allowed or len(groups[name]) > room:
                break
            chosen.append(name)
            left, room = left - one, room - len(groups[name])
    return chosen


def _telling(
    state: State, inputs: Sequence[Sample], outputs: Sequence[Sample]
) -> tuple[list[Sample], list[Sample]]:
    """Some samples, those that lose most first, for what spoils outputs may be rare.

    Of one that is lost whole little can be told: such samples come last, the worst at the end.
    """
    inputs, outputs = inputs[:_SEEN], outputs[:_SEEN]
    ready = Judged(quantized(state.model, state, state.recipe), state.model, len(inputs))
    lost = [_relative(together([errors])) for errors in ready.errors(inputs, outputs)]
    order = sorted(
        range(len(inputs)), key=lambda i: (lost[i] > _LOST, lost[i] if lost[i] > _LOST else -lost[i])
    )
    return [inputs[index] for index in order], [outputs[index] for index in order]


def _relative(close: Closeness) -> float:
    return close.noise / close.signal if close.signal > 0 else 0.0


def _room(state: State) -> int:
    """How many activations may still become wide."""
    count = len(_activations(state))
    return min(count, max(_FEWEST, int(_SHARE * count))) - len(_wide(state))


def _activations(state: State) -> list[str]:
    plan = state.plan
    return [n for n, t in plan.tensors.items() if t.role is Role.ACTIVATION and plan.in_integers(n)]


def _wide(state: State) -> list[str]:
    return [name for name in _activations(state) if not _narrow(state, name)]


def _narrow(state: State, name: str) -> bool:
    return state.params[name].qtype.bits == 8


def _in_sixteen(state: State, leaders: Sequence[str]) -> State:
    """The state with these groups in int16."""
    groups = {names[0]: names for names in movable(state)}
    names = {name for leader in leaders for name in groups[leader]}
    tensors = dict(state.plan.tensors)
    for name in names:
        tensor = tensors[name]
        scheme = replace(tensor.integer, qtype=QType.INT16 if tensor.integer.qtype.signed else QType.UINT16)
        tensors[name] = replace(
            tensor, scheme=scheme, reason=f"{tensor.reason} (in 16 bits: 8 spoil an output)"
        )
    plan = replace(state.plan, tensors=tensors)
    found = scales_of(replace(state, plan=plan)).params
    values = values_by_name(state.model.graph)
    moved = {name: _roomy(found[name], values[name]) for name in names}
    return with_params(replace(state, plan=plan), moved) if moved else state


def _roomy(params: QParams, value: ir.Value) -> QParams:
    """With room, but where the range ends at a bound that its saturation stands for."""
    maker = value.producer()
    if maker is not None and maker.op_type == "Clip":
        return params
    return replace(params, scale=np.asarray(params.scale * np.float32(_ROOM), np.float32))
