"""What `effort` adds to calibration: steps that are kept only where a held-out error falls."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from roundel.algorithms.finetune import finetune
from roundel.algorithms.finetune_checkpoint import Checkpoint, checkpoint_at
from roundel.algorithms.finetune_report import FinetuneReport
from roundel.algorithms.walk import LayerReport, Progress, walk
from roundel.calibrate.state import QuantState
from roundel.errors import RecipeError
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
    layers: tuple[LayerReport, ...] | tuple[FinetuneReport, ...] = ()


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


def improve(
    model: ir.Model,
    state: QuantState,
    samples: Sequence[Sample],
    outputs: Sequence[Sample],
    recipe: Recipe,
    told: Progress,
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
    if len(samples) < _FEWEST:
        note = f"effort {recipe.effort} needs {_FEWEST} samples or more: calibration only"
        return Improved(state, (), (note,))
    judge = _Judge(model, samples, outputs, recipe)
    steps: list[StepReport] = []
    if recipe.improve.rounding:
        state = judge.kept(state, steps, "rounding", lambda s: walk(model, s, samples, recipe, progress=told))
    if recipe.finetuning != "none":
        told.step("fine-tune layer by layer")

        def heard(done: int, total: int, error: float) -> None:
            told.advance(done)

        def tune(now: QuantState) -> tuple[QuantState, tuple[FinetuneReport, ...]]:
            place, resume = (checkpoint.path, checkpoint.resume) if checkpoint else (None, False)
            return finetune(model, now, samples, recipe, progress=heard, checkpoint=place, resume=resume)

        state = judge.kept(state, steps, "fine-tuning", tune)
    return Improved(state, tuple(steps))


class _Judge:
    """The whole model's output error on samples that no step has learned from."""

    def __init__(
        self, model: ir.Model, samples: Sequence[Sample], outputs: Sequence[Sample], recipe: Recipe
    ) -> None:
        first = len(samples) - max(1, round(len(samples) * _HELD_SHARE))
        self.model, self.recipe = model, recipe
        self.samples, self.outputs = samples[first:], outputs[first:]

    def kept(
        self, state: QuantState, steps: list[StepReport], name: str, work: Callable[[QuantState], Worked]
    ) -> QuantState:
        """The state after the step, or the one before it where the held-out error did not fall."""
        start = time.perf_counter()
        before = steps[-1].after_db if steps else self.sqnr(state)
        better, layers = work(state)
        after = self.sqnr(better)
        good = after > before
        took = time.perf_counter() - start
        steps.append(StepReport(name, before, after if good else before, good, took, layers))
        return better if good else state

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
