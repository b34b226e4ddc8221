"""What `effort` adds to calibration: steps that are kept only where a held-out error falls."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import onnx_ir as ir

from roundel.calibrate.positions import refine
from roundel.calibrate.statistics import QuantState
from roundel.improve.biases import correct_biases, find_shifts
from roundel.improve.finetune import finetune
from roundel.improve.judge import StepReport, as_if_rounded, output_sqnr, verdict
from roundel.improve.memory import once, run_key
from roundel.improve.ranges import choose_ranges
from roundel.improve.reports import FEWEST, LayerReport, held_out_count
from roundel.improve.rounding import walk
from roundel.recipe.settings import Recipe
from roundel.types import Listener, Sample
from roundel.work.checkpoints import Memory, Store

Worked = tuple[QuantState, tuple[LayerReport, ...]]


@dataclass(frozen=True, slots=True)
class Improved:
    """The state after all steps that helped; None where nothing was calibrated."""

    state: QuantState | None
    steps: tuple[StepReport, ...]
    notes: tuple[str, ...] = ()


class Told(Listener, Protocol):
    """Hears which step runs, how far it is, and what it says about itself."""

    def advance(self, done: float) -> None:
        """Units of it are done; a share of a unit counts."""

    def say(self, text: str) -> None:
        """A few words beside the bar."""


def improve(
    model: ir.Model,
    state: QuantState,
    samples: Sequence[Sample],
    outputs: Sequence[Sample],
    recipe: Recipe,
    told: Told,
    store: Store | None = None,
) -> Improved:
    """Run the steps that the recipe's effort asks for.

    Args:
        model: the prepared float model.
        state: calibrated, and legal for its target.
        samples: inputs; the last fifth judges.
        outputs: the float model's outputs for them.
        recipe: effort and settings.
        told: hears about progress.
        store: where steps, and layers of rounding and fine-tuning, are written down when they are done.
    """
    if recipe.effort == "none":
        return Improved(state, ())
    if len(samples) < FEWEST:
        note = f"nothing was improved beyond calibration: {recipe.effort} effort needs {FEWEST} samples"
        return Improved(state, (), (note,))
    held = held_out_count(len(samples))

    def sqnr(now: QuantState, *, foreseen: bool) -> float:
        judged = as_if_rounded(model.graph, now) if foreseen else now
        return output_sqnr(model, judged, recipe, samples[-held:], outputs[-held:])

    def memory(step: str, now: QuantState) -> Memory | None:
        return None if store is None else store.memory(step, run_key(model, now, samples, recipe))

    def moved(now: QuantState) -> tuple[QuantState, tuple[LayerReport, ...]]:
        found, tensors = choose_ranges(model, now, samples[:-held], outputs[:-held], recipe, progress=told)
        return refine(model, found, recipe.npu), tensors

    def ranged(now: QuantState) -> Worked:
        return once(memory("ranges", now), now, moved)

    def rounded(now: QuantState) -> Worked:
        return walk(model, now, samples, recipe, progress=told, memory=memory("rounding", now))

    def corrected(now: QuantState) -> Worked:
        return once(
            memory("biases", now), now, lambda s: correct_biases(model, s, samples, recipe, progress=told)
        )

    def tuned(now: QuantState) -> Worked:
        return finetune(model, now, samples, recipe, progress=told, memory=memory("finetune", now))

    work: list[tuple[str, Callable[[QuantState], Worked]]] = []
    if recipe.improve.ranges:
        work.append(("ranges", ranged))
    # Before rounding, which makes up in integer layers for what is still missing behind these.
    if recipe.improve.biases and any(find_shifts(model.graph, state.plan)):
        work.append(("bias correction", corrected))
    if recipe.improve.rounding:
        work.append(("rounding", rounded))
    if recipe.finetuning != "none":
        work.append(("fine-tuning", tuned))
    steps: list[StepReport] = []
    ahead = recipe.improve.rounding
    for name, step in work:
        start = time.perf_counter()
        ahead = ahead and name != "rounding"
        known = steps[-1].after_db if steps and steps[-1].foreseen == ahead else None
        before = sqnr(state, foreseen=ahead) if known is None else known
        better, layers = step(state)
        errors = (before, sqnr(better, foreseen=ahead))
        report = verdict(name, errors, time.perf_counter() - start, layers, foreseen=ahead)
        state = better if report.kept else state
        steps.append(report)
    return Improved(state, tuple(steps))
