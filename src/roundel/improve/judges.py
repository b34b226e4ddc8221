"""Who decides whether a step stays: the whole model's error on samples that the step has not learned from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from roundel.data import open_samples
from roundel.improve.activations import as_computed
from roundel.improve.constants import Written
from roundel.improve.layers import quantized_layers
from roundel.improve.probe import Judged, let_out_logits, run_size
from roundel.improve.probe import judged as quantized
from roundel.improve.weight_only import packed_sqnr
from roundel.model.graph import input_specs
from roundel.plan import build_plan
from roundel.stages import collect, plan, resolve, write
from roundel.state import State, held_out_count
from roundel.types import QType, Sample

_FINER = 8  # the weights' step against the one that leaves the error of rounding: 2.5 to 10 were seen
_FINENESSES = (3, 8)  # one rounding of the weights is one draw; with other steps it is another
_MOST = 24  # samples
_ELEMENTS = 1_500_000  # of their inputs: 10 images of 224 x 224; smaller ones are cheap, so there are more
_LEAST_SEEN, _SEEN_ELEMENTS = 4, 600_000  # of them give the ranges for this verdict, of small ones all


def unseen(state: State) -> Iterator[float]:
    """The quantized model's SQNR in dB on samples that no step has learned from."""
    yield _held_out_sqnr(state, state)


def ahead_of_rounding(state: State) -> Iterator[float]:
    """The same, with weights as rounding will about leave them."""
    yield _held_out_sqnr(state, as_if_rounded(state.model.graph, state))


def _held_out_sqnr(state: State, judged: State) -> float:
    inputs, outputs = to_learn(state)
    held = held_out_count(len(inputs))
    return output_sqnr(state, judged, inputs[-held:], outputs[-held:])


def to_learn(state: State) -> tuple[Sequence[Sample], Sequence[Sample]]:
    """The samples of the steps, with the float model's outputs; the last fifth judges."""
    count = state.recipe.improve.samples
    return state.inputs[:count], state.outputs[:count]


def held_out_packed(state: State) -> Iterator[float]:
    """The same for weights in few bits, whose error the float model shows when it computes with them."""
    held = state.inputs[-held_out_count(len(state.inputs)) :]
    yield packed_sqnr(state.model, state.plan, state.packed, held)


# Before calibration: the state as it would come out, from a few samples.


def outliers(state: State) -> Iterator[float]:
    """The model that calibration on the few samples gives, on those of them that it has not seen."""
    first = first_held(state)
    model = _calibrated(state, state.few.inputs[:first])
    numbers = range(first, len(state.few.inputs))
    inputs, wanted = [state.few.inputs[n] for n in numbers], [state.few.wanted[n] for n in numbers]
    yield Judged(model, state.model, len(inputs)).error(inputs, wanted).sqnr_db


def equalization(state: State) -> Iterator[float]:
    """The model calibrated on a few samples, on the same: no factor has been chosen by any of them.

    Where rounding follows, there is one draw for each of several finenesses of the weights. They share the
    samples where a run takes long.
    """
    numbers = spread_evenly(state.model.graph, state.few.inputs)
    inputs, wanted = [state.few.inputs[n] for n in numbers], [state.few.wanted[n] for n in numbers]
    size = run_size(state.model.graph, inputs[0])
    seen = inputs[:: -(-len(inputs) // max(_LEAST_SEEN, _SEEN_ELEMENTS // size))]
    ranges = open_samples(seen, input_specs(state.model))
    now = resolve(collect(plan(replace(state, notes=())), ranges))
    if not state.recipe.improve.rounding or len(inputs) < len(_FINENESSES):
        yield output_sqnr(now, now, inputs, wanted)
        return
    graph = now.model.graph
    states = [as_if_rounded(graph, now, finer) for finer in _FINENESSES]
    moved = [name for name, params in states[0].params.items() if params is not now.params[name]]
    written = Written(now.model, quantized(now.model, states[0], now.recipe))
    for first, finely in enumerate(states):
        if first:
            written.take(finely, moved)
        share = len(states) if len(inputs) * size > _SEEN_ELEMENTS else 1
        part = slice(first % share, None, share)
        judged = Judged(written.model, now.model, len(inputs[part]))
        yield judged.error(inputs[part], wanted[part]).sqnr_db


def straightened(state: State) -> Iterator[float]:
    """The float model with HardSigmoid where the NPU has it, against the model as it was prepared.

    Nothing is rounded: where the swap alone leaves hardly a signal, verdicts on the quantized model hang on
    chance, and 20 dB lay between two of its draws.
    """
    model = as_computed(state.model, build_plan(state.model, state.recipe), state.recipe.npu)
    let_out_logits(model.graph, state.model.graph)
    inputs, wanted = [state.few.inputs[n] for n in state.few.wanted], list(state.few.wanted.values())
    yield Judged(model, state.model, len(inputs)).error(inputs, wanted).sqnr_db


def first_held(state: State) -> int:
    """The number of the first of the few samples that judge."""
    return len(state.few.inputs) - held_out_count(len(state.few.inputs))


def spread_evenly(graph: ir.Graph, samples: Sequence[Sample]) -> list[int]:
    """The numbers of the samples that judge equalization, evenly spread: one for each fineness or more."""
    count = min(len(samples), _MOST, max(len(_FINENESSES), _ELEMENTS // run_size(graph, samples[0])))
    return [int(index) for index in np.linspace(0, len(samples) - 1, count).round()]


def _plainly(state: State) -> State:
    """A copy that keeps no samples and goes through no steps."""
    plain = {"effort": "none", "verify": {"samples": 1}, "weight_only": {"algorithm": "round"}}
    tuning = {"improve": {"finetune": {"algorithm": "none"}}}
    return replace(state, recipe=state.recipe.merged({**plain, **tuning}), notes=())


def _calibrated(state: State, samples: Sequence[Sample]) -> ir.Model:
    """The model that a state and these samples give, with the outputs that `OutputErrors` asks for."""
    planned = plan(_plainly(state))
    now = resolve(collect(planned, open_samples(samples, input_specs(state.model))))
    if now.recipe.mode == "static":
        return quantized(now.model, now, now.recipe)
    written = write(now).written
    assert written is not None
    let_out_logits(written.graph, now.model.graph)
    return written


# Errors.


def as_if_rounded(graph: ir.Graph, state: State, finer: int = _FINER) -> State:
    """The state with finer weights: what a step before rounding should be judged by.

    Plainly rounded weights often make a hundred times the error of everything else, most of which rounding
    takes away. Beside them a better range or channel cannot be told from a worse one.

    Args:
        graph: the prepared float model.
        state: calibrated.
        finer: how many times smaller the weights' steps become.
    """
    params = dict(state.params)
    layers = quantized_layers(graph, state.plan)
    for name in (name for layer in layers for name in (layer.weight, layer.bias) if name is not None):
        old = params[name]
        if old.qtype is QType.INT8 and name not in state.codes:
            scale = np.asarray(old.scale / finer, np.float32)
            params[name] = replace(
                old, scale=scale, zero_point=old.zero_point.astype(np.int16), qtype=QType.INT16
            )
    return replace(state, params=params)


def output_sqnr(state: State, judged: State, samples: Sequence[Sample], outputs: Sequence[Sample]) -> float:
    """SQNR of the quantized model in dB, over all its float outputs, which count alike.

    Args:
        state: the float model and the recipe.
        judged: says how it is quantized.
        samples: inputs.
        outputs: the float model's outputs for them.
    """
    model = quantized(state.model, judged, state.recipe)
    return Judged(model, state.model, len(samples)).error(samples, outputs).sqnr_db
