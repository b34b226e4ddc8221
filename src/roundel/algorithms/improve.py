"""What `effort` adds to calibration: steps that are kept only where a held-out error falls."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from roundel.algorithms.walk import LayerReport, Progress, walk
from roundel.calibrate.state import QuantState
from roundel.model.session import open_session
from roundel.numerics.metrics import Closeness
from roundel.qdq import simulate, write_qdq
from roundel.recipe import Recipe
from roundel.types import Sample

_FEWEST = 4  # samples: with fewer, nothing is left to judge by
_HELD_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step: the whole model's held-out SQNR before and after, in dB."""

    step: str
    before_db: float
    after_db: float
    kept: bool
    seconds: float
    layers: tuple[LayerReport, ...] = ()


@dataclass(frozen=True, slots=True)
class Improved:
    """The state after all steps that helped; None where nothing was calibrated."""

    state: QuantState | None
    steps: tuple[StepReport, ...]
    notes: tuple[str, ...] = ()


def improve(
    model: ir.Model,
    state: QuantState,
    samples: Sequence[Sample],
    outputs: Sequence[Sample],
    recipe: Recipe,
    told: Progress,
) -> Improved:
    """Run the steps that the recipe's effort asks for.

    Args:
        model: the prepared float model.
        state: calibrated, and legal for its target.
        samples: inputs; the last fifth judges.
        outputs: the float model's outputs for them.
        recipe: effort and settings.
        told: hears about progress.
    """
    if recipe.effort == "none" or not recipe.improve.rounding:
        return Improved(state, ())
    if len(samples) < _FEWEST:
        note = f"effort {recipe.effort} needs {_FEWEST} samples or more: calibration only"
        return Improved(state, (), (note,))
    judge = _Judge(model, samples, outputs, recipe)
    start, before = time.perf_counter(), judge.sqnr(state)
    better, layers = walk(model, state, samples, recipe, progress=told)
    after = judge.sqnr(better)
    kept = after > before
    step = StepReport(
        "rounding", before, after if kept else before, kept, time.perf_counter() - start, layers
    )
    return Improved(better if kept else state, (step,))


class _Judge:
    """The whole model's output error on samples that no step has learned from."""

    def __init__(
        self, model: ir.Model, samples: Sequence[Sample], outputs: Sequence[Sample], recipe: Recipe
    ) -> None:
        first = len(samples) - max(1, round(len(samples) * _HELD_SHARE))
        self.model, self.recipe = model, recipe
        self.samples, self.outputs = samples[first:], outputs[first:]

    def sqnr(self, state: QuantState) -> float:
        """In dB, over all float outputs together."""
        written = write_qdq(self.model, state, self.recipe)
        simulate(written, state, self.recipe.npu)
        session = open_session(written, simulate=True)
        names = [out.name for out in session.get_outputs()]
        total = Closeness()
        for sample, wanted in zip(self.samples, self.outputs, strict=True):
            for name, value in zip(names, session.run(None, sample), strict=True):
                reference = wanted.get(name)
                if reference is not None and reference.dtype.kind == "f" and reference.shape == value.shape:
                    total = total.merge(Closeness.of(reference, value))
        return total.sqnr_db
