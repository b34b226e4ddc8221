"""What `effort` adds to calibration: steps that are kept only where a held-out error falls."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import onnx_ir as ir

from roundel.algorithms.correct_biases import correct_biases, find_shifts
from roundel.algorithms.finetune import finetune
from roundel.algorithms.finetune_checkpoint import Checkpoint, checkpoint_at
from roundel.algorithms.finetune_report import FinetuneReport, Moment
from roundel.algorithms.judge import FEWEST, StepReport, held_out, output_sqnr, verdict
from roundel.algorithms.output_ranges import choose_ranges
from roundel.algorithms.walk import LayerReport, Progress, walk
from roundel.calibrate.positions import refine
from roundel.calibrate.state import QuantState
from roundel.errors import RecipeError
from roundel.recipe import Recipe
from roundel.types import Sample

__all__ = ["Improved", "StepReport", "checkpoint_for", "improve"]

_NAMES = {"adaround": "AdaRound", "adaquant": "AdaQuant"}
Worked = tuple[QuantState, tuple[LayerReport, ...] | tuple[FinetuneReport, ...]]


@dataclass(frozen=True, slots=True)
class Improved:
    """The state after all steps that helped; None where nothing was calibrated."""

    state: QuantState | None
    steps: tuple[StepReport, ...]
    notes: tuple[str, ...] = ()


def checkpoint_for(recipe: Recipe, place: str | Path | None, *, resume: bool) -> Checkpoint | None:
    """Where this run's fine-tuning is written down; None where nobody asked.

    Raises:
        RecipeError: there is nothing to write down, or nothing to resume from.
        OutputError: it cannot be written there.
    """
    if place is None:
        if resume:
            raise RecipeError(
                "There is nothing to resume from.",
                expected="a checkpoint: the folder or file that the earlier run was given",
                hint="Pass checkpoint=… (command line: --checkpoint DIR).",
            )
        return None
    if recipe.finetuning == "none":
        raise RecipeError(
            "A checkpoint was asked for, and this recipe has no fine-tuning to write down.",
            where=place,
            observed=f"recipe {recipe.name}, effort {recipe.effort}",
            hint="Choose effort high or a preset like xint8_adaround, or leave the checkpoint out.",
        )
    return checkpoint_at(place, resume=resume)


class Told(Progress, Protocol):
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
    checkpoint: Checkpoint | None = None,
) -> Improved:
    """Run the steps that the recipe's effort asks for.

    Args:
        model: the prepared float model.
        state: calibrated, and legal for its target.
        samples: inputs; the last fifth judges.
        outputs: the float model's outputs for them.
        recipe: effort and settings.
        told: hears about progress.
        checkpoint: where fine-tuning writes down what is done; the steps before it are run again.
    """
    if recipe.effort == "none":
        return Improved(state, ())
    if len(samples) < FEWEST:
        note = f"effort {recipe.effort} needs {FEWEST} samples or more: calibration only"
        return Improved(state, (), (note,))
    held = held_out(len(samples))

    def sqnr(now: QuantState) -> float:
        return output_sqnr(model, now, recipe, samples[-held:], outputs[-held:])

    def ranged(now: QuantState) -> Worked:
        moved, tensors = choose_ranges(model, now, samples[:-held], outputs[:-held], recipe, progress=told)
        return refine(model, moved, recipe.npu), tensors

    def rounded(now: QuantState) -> Worked:
        return walk(model, now, samples, recipe, progress=told)

    def corrected(now: QuantState) -> Worked:
        return correct_biases(model, now, samples, recipe, progress=told)

    def tuned(now: QuantState) -> Worked:
        return _tuned(model, now, samples, recipe, told, checkpoint)

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
    for name, step in work:
        start = time.perf_counter()
        before = steps[-1].after_db if steps else sqnr(state)
        better, layers = step(state)
        report = verdict(name, (before, sqnr(better)), time.perf_counter() - start, layers)
        state = better if report.kept else state
        steps.append(report)
    return Improved(state, tuple(steps))


def _tuned(
    model: ir.Model,
    state: QuantState,
    samples: Sequence[Sample],
    recipe: Recipe,
    told: Told,
    checkpoint: Checkpoint | None,
) -> Worked:
    def heard(now: Moment) -> None:
        if now.loss is None:
            told.step(f"fine-tune by {_NAMES[recipe.finetuning]}", now.total)
        else:
            told.say(f"loss {now.loss:.1e}")
        told.advance(now.done)

    place, resume = (checkpoint.path, checkpoint.resume) if checkpoint else (None, False)
    return finetune(model, state, samples, recipe, progress=heard, checkpoint=place, resume=resume)
