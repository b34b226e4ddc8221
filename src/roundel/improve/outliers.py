"""Rewrites that make outliers harmless before anything is calibrated; kept where a held-out error falls."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from roundel.improve.judge import StepReport, verdict
from roundel.improve.probe import OutputErrors, together
from roundel.improve.reports import FEWEST, LayerReport, held_out_count
from roundel.improve.rotate import rotate
from roundel.improve.smooth import find_groups, look_at_channels, smooth
from roundel.model.session import open_session
from roundel.passes import refresh_shapes
from roundel.plan import build_plan
from roundel.recipe.settings import Recipe
from roundel.types import Listener, Sample

Quantize = Callable[[ir.Model, Sequence[Sample]], ir.Model]


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """The float model after the rewrites that helped."""

    model: ir.Model
    steps: tuple[StepReport, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Done:
    """What a rewrite did: whether anything, in words, and layer by layer where it works so."""

    anything: bool
    words: str
    layers: tuple[LayerReport, ...] = ()


def spread_outliers(
    model: ir.Model, samples: Sequence[Sample], recipe: Recipe, quantize: Quantize, told: Listener
) -> Spread:
    """Rotate the residual stream, then smooth the layers' inputs, as far as the recipe asks for it.

    Rotation comes first: it folds the scales of the norms into the layers, and would undo the smoothing.

    Args:
        model: the prepared float model; it is not changed.
        samples: inputs; the last fifth judges.
        recipe: `improve.rotate` and `improve.smooth`.
        quantize: calibrates a float model on samples and writes it, without further steps.
        told: hears about progress.
    """
    if len(samples) < FEWEST:
        return Spread(model, (), (f"rotation and smoothing need {FEWEST} samples or more: left out",))
    trial = _Trial(model, samples, recipe, quantize)
    if recipe.improve.rotate.enabled:
        told.step("rotate")
        trial.run("rotation", _rotated)
    if recipe.improve.smooth.enabled:
        told.step("smooth")
        trial.run("smoothing", _smoothed)
    return Spread(trial.model, tuple(trial.steps), tuple(trial.notes))


class _Trial:
    """Rewrites one after the other, each judged on samples that neither it nor calibration has seen."""

    def __init__(
        self, model: ir.Model, samples: Sequence[Sample], recipe: Recipe, quantize: Quantize
    ) -> None:
        first = len(samples) - held_out_count(len(samples))
        self.model, self.recipe = model, recipe
        self.learn, self.held = samples[:first], samples[first:]
        self.steps: list[StepReport] = []
        self.notes: list[str] = []
        self._quantize = quantize
        session = open_session(model)
        self._errors = OutputErrors(model.graph)
        names = self._errors.names
        self._wanted = [dict(zip(names, session.run(names, s), strict=True)) for s in self.held]

    def run(self, name: str, work: Callable[[ir.Model, _Trial], _Done]) -> None:
        """Rewrite a copy, and go on with it where the error falls."""
        start = time.perf_counter()
        better = self.model.clone()
        done = work(better, self)
        self.notes.append(f"{name}: {done.words}")
        if not done.anything:
            return
        refresh_shapes(better)
        before = self.steps[-1].after_db if self.steps else self._sqnr(self.model)
        report = verdict(name, (before, self._sqnr(better)), time.perf_counter() - start, done.layers)
        self.model = better if report.kept else self.model
        self.steps.append(report)

    def _sqnr(self, model: ir.Model) -> float:
        """Of the quantized model in dB, over all its float outputs, which count alike."""
        session = open_session(self._quantize(model, self.learn), simulate=True)
        pairs = zip(self.held, self._wanted, strict=True)
        found = (self._errors.of(wanted, session.run(self._errors.names, sample)) for sample, wanted in pairs)
        return together(found).sqnr_db


def _rotated(model: ir.Model, trial: _Trial) -> _Done:
    reports = rotate(model, trial.recipe.improve.rotate)
    turned, left = ([r for r in reports if r.kept is kept] for kept in (True, False))
    told = [
        f"stream '{r.tensor}', {r.width} wide, {r.norms} norms, {r.layers} layers: {r.where}" for r in turned
    ]
    if left:
        several = f"; {len(left) - 1} more likewise" if len(left) > 1 else ""
        told.append(f"stream '{left[0].tensor}' stays as it is: {left[0].where}{several}")
    words = "; ".join(told) or "no norm over the last axis was found, so there is no residual stream"
    return _Done(bool(turned), words)


def _smoothed(model: ir.Model, trial: _Trial) -> _Done:
    plan = build_plan(model, trial.recipe)
    groups = find_groups(model.graph, plan)
    seen = look_at_channels(model, groups, trial.learn, trial.held) if groups else {}
    reports = smooth(model, groups, seen, plan, trial.recipe)
    places = Counter(report.where for report in reports)
    told = ", ".join(f"{count} x {where}" for where, count in places.most_common())
    words = f"{len(reports)} tensors before layers: {told}" if told else "no quantized MatMul or Gemm found"
    layers = tuple(layer for report in reports for layer in report.layers)
    return _Done(any(report.kept for report in reports), words, layers)
