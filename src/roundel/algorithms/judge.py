"""Who decides whether a step stays: the whole model's error on samples that the step has not learned from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from roundel.algorithms.finetune_report import FinetuneReport
from roundel.algorithms.output_error import OutputErrors, together
from roundel.algorithms.walk import LayerReport
from roundel.calibrate.state import QuantState
from roundel.model.session import open_session
from roundel.qdq import simulate, write_qdq
from roundel.recipe import Recipe
from roundel.types import Sample


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
    """

    step: str
    before_db: float
    after_db: float
    kept: bool
    seconds: float
    layers: tuple[LayerReport, ...] | tuple[FinetuneReport, ...] = ()
    refused_db: float | None = None


def verdict(
    step: str,
    errors: tuple[float, float],
    seconds: float,
    layers: tuple[LayerReport, ...] | tuple[FinetuneReport, ...] = (),
) -> StepReport:
    """A step is kept where the SQNR with it (the second number) is higher than without it (the first)."""
    before, tried = errors
    if tried > before:
        return StepReport(step, before, tried, True, seconds, layers)
    return StepReport(step, before, before, False, seconds, layers, refused_db=tried)


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
