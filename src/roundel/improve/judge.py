"""Who decides whether a step stays: the whole model's error on samples that the step has not learned from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from roundel.calibrate.statistics import QuantState
from roundel.improve.layers import quantized_layers
from roundel.improve.probe import OutputErrors, together
from roundel.improve.reports import LayerReport
from roundel.model.session import open_session
from roundel.qdq import simulate, write_qdq
from roundel.recipe.settings import Recipe
from roundel.types import QType, Sample

_FINER = 8  # the weights' step against the one that leaves the error of rounding: 2.5 to 10 were seen


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step, and what it did to the whole model's held-out SQNR in dB.

    Attributes:
        step: its name.
        before_db: without it.
        after_db: with it where it was kept, else without it.
        kept: whether the error fell.
        seconds: what it cost, judging included.
        layers: the same layer by layer, where the step works so.
        refused_db: with it where it was not kept.
        foreseen: whether that was judged with weights as rounding, which follows, will about leave them.
    """

    step: str
    before_db: float
    after_db: float
    kept: bool
    seconds: float
    layers: tuple[LayerReport, ...] = ()
    refused_db: float | None = None
    foreseen: bool = False


def verdict(
    step: str,
    errors: tuple[float, float],
    seconds: float,
    layers: tuple[LayerReport, ...] = (),
    *,
    foreseen: bool = False,
) -> StepReport:
    """A step is kept where the SQNR with it (the second number) is higher than without it (the first)."""
    before, tried = errors
    if tried > before:
        return StepReport(step, before, tried, True, seconds, layers, foreseen=foreseen)
    return StepReport(step, before, before, False, seconds, layers, refused_db=tried, foreseen=foreseen)


def as_if_rounded(graph: ir.Graph, state: QuantState, finer: int = _FINER) -> QuantState:
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


def output_sqnr(
    model: ir.Model, state: QuantState, recipe: Recipe, samples: Sequence[Sample], outputs: Sequence[Sample]
) -> float:
    """SQNR of the quantized model in dB, over all its float outputs, which count alike.

    Args:
        model: the prepared float model.
        state: says how it is quantized.
        recipe: formats and arithmetic.
        samples: inputs.
        outputs: the float model's outputs for them.
    """
    written = write_qdq(model, state, recipe)
    simulate(written, state, recipe.npu)
    session = open_session(written, simulate=True)
    errors = OutputErrors(model.graph)
    pairs = zip(samples, outputs, strict=True)
    return together(errors.of(wanted, session.run(errors.names, sample)) for sample, wanted in pairs).sqnr_db
