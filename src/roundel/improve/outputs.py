"""The last look at each output: where one misses the goal, what is behind it, and which command helps."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from roundel.improve.judges import to_learn, unseen
from roundel.improve.probe import QuantizerProbe, run_size
from roundel.improve.ranges import movable, noise_alone
from roundel.improve.widths import held_errors
from roundel.numerics.metrics import Closeness
from roundel.plan.float_parts import joined_outputs
from roundel.plan.types import Derived, Role
from roundel.state import State, held_out_count
from roundel.types import Listener, Scheme

_RUNS, _LEAST_RUNS, _RUN_ELEMENTS = 20, 8, 2_000_000  # of the probe, fewer for a big model
_MOST = 4  # tensors that advice names
_LOOKED = 2  # samples
_GAIN_DB = 1.0  # what advice must promise


def look_at_outputs(state: State, told: Listener) -> State:
    """The state with the final error of each output, and advice where one misses the goal."""
    goal = state.recipe.improve.goal
    if _surely_reached(state, goal):
        return state
    told.step("look at each output")
    errors = held_errors(state, state)
    state, (worst, reached) = replace(state, held=errors.each), errors.worst
    if reached >= goal:
        return state
    told.step("look for what spoils the outputs")
    return state.noted(_advice(state, worst, told))


def _surely_reached(state: State, goal: float) -> bool:
    """Whether the last verdict on all outputs together leaves no doubt about any of them."""
    joints = joined_outputs(state.model.graph).values()
    parts = len(state.model.graph.outputs) + sum(len(joint.places) for joint in joints)
    return (
        state.judged is not None
        and state.judged[0] is unseen
        and (state.judged[1] >= goal + 10 * math.log10(max(1, parts)))
    )


@dataclass(frozen=True, slots=True)
class _Cause:
    """What the error would be without some of the quantizers.

    Attributes:
        activations: SQNR in dB with the activations alone in few bits, weights in float.
        weights: with the weights alone.
        spared: with all but these in few bits.
        names: the tensors that are spared.
        whole: with all.
    """

    activations: float
    weights: float
    spared: float
    names: tuple[str, ...]
    whole: float


def _advice(state: State, worst: str, told: Listener) -> str:
    """What would help, by the probe, which has all switches in one model."""
    said = (
        f"output '{worst}' is {state.held[worst]:.1f} dB from the float model on samples that no step has"
        f" learned from, below the goal of {state.recipe.improve.goal:g}"
    )
    cause = _cause(state, told)
    ways = []
    wide = state.recipe.activations.type.endswith("16")
    if not wide and cause.weights > cause.whole + _GAIN_DB:
        ways.append(
            f"activations in 16 bits give about {cause.weights - cause.whole:.0f} dB more (--preset a16w8)"
        )
    if cause.names and cause.spared > cause.whole + _GAIN_DB:
        chosen = json.dumps([{"tensors": list(cause.names), "type": "float"}])
        gain = cause.spared - cause.whole
        ways.append(
            f"{len(cause.names)} tensors in float give about {gain:.0f} dB more (-s 'overrides={chosen}')"
        )
    return f"{said}: {'; '.join(ways) or 'no few tensors cause it; try --preset a16w8 or bf16'}"


def _cause(state: State, told: Listener) -> _Cause:
    inputs, outputs = to_learn(state)
    held = held_out_count(len(inputs))
    moving, constant = movable(state), _constants(state)
    samples = inputs[:-held], outputs[:-held]
    probe = QuantizerProbe(state.model, state, [*moving, *constant], state.recipe, *samples)
    runs = min(_RUNS, max(_LEAST_RUNS, _RUN_ELEMENTS // run_size(state.model.graph, inputs[0])))

    def error(groups: Sequence[tuple[str, ...]]) -> Closeness:
        return probe.error({names[0]: None for names in groups}, _LOOKED)

    whole, activations, weights = error([*moving, *constant]), error(moving), error(constant)
    several = [*moving, *constant]
    noise, _ = noise_alone(probe, {n[0]: state.params[n[0]].scale for n in several}, runs, told)
    ranked = sorted(zip(noise, several, strict=True), key=lambda pair: -pair[0])
    named = [names for one, names in ranked[:_MOST] if one > 0]
    spared = error([names for names in several if names not in named])
    tensors = tuple(name for names in named for name in names)
    return _Cause(activations.sqnr_db, weights.sqnr_db, spared.sqnr_db, tensors, whole.sqnr_db)


def _constants(state: State) -> list[tuple[str, ...]]:
    """The constants in integers that have scales of their own, one by one."""
    plan = state.plan
    return [
        (name,)
        for name, tensor in plan.tensors.items()
        if tensor.role is not Role.ACTIVATION
        and isinstance(tensor.scheme, Scheme)
        and not isinstance(tensor.source, Derived)
    ]
