"""Which layers take the second element type: tried one by one, then together, from the kindest on.

Goal speed: the second type is the cheap one, and layers take it as long as the error stays within the limit.
Goal quality: it is the better one, and layers take it until the error is within.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from roundel.calibrate.observers import Observer
from roundel.calibrate.positions import refine
from roundel.calibrate.resolve import resolve
from roundel.calibrate.runner import run_session
from roundel.errors import RecipeError
from roundel.model.session import open_session
from roundel.numerics.metrics import DISTANCES, IN_DECIBELS
from roundel.plan import QuantPlan, build_plan
from roundel.plan.build import candidates, with_mixed
from roundel.qdq import simulate, write_qdq
from roundel.recipe.settings import Recipe
from roundel.types import Sample

Progress = Callable[[int, int], None]


def mix_layers(
    model: ir.Model,
    stats: Mapping[str, Observer],
    samples: Sequence[Sample],
    outputs: Sequence[Sample],
    recipe: Recipe,
    progress: Progress,
) -> tuple[QuantPlan, str]:
    """Choose the layers of a recipe with a threshold.

    Args:
        model: the prepared float model.
        stats: of all tensors that its plan observes or watches.
        samples: inputs.
        outputs: the float model's outputs for them.
        recipe: types, candidates, metric, threshold and goal.
        progress: called with what is done, and how much there is.

    Returns:
        The plan with the chosen layers mixed, and a sentence about them.

    Raises:
        RecipeError: there is no such output, or nothing to judge by.
    """
    trial = _Trial(model, stats, samples, outputs, recipe)
    names = candidates(model.graph, trial.plan(()).nodes, recipe.mixed)
    start = error = trial.error(())
    chosen: tuple[str, ...] = ()
    for name in () if trial.finished(start) else _ranked(names, trial, progress):
        tried = trial.error((*chosen, name))
        if recipe.mixed.goal == "speed" and tried > trial.limit:
            break
        chosen, error = (*chosen, name), tried
        progress(len(names) + len(chosen), 2 * len(names))
        if trial.finished(error):
            break
    kind, told = recipe.mixed.type, f"{trial.words(start)} -> {trial.words(error)}"
    reached = "within" if error <= trial.limit else "not within"
    story = f"{len(chosen)} of {len(names)} layers in {kind}: {told}, {reached} {trial.words(trial.limit)}"
    return trial.plan(chosen), f"mixed precision: {story}"


def _ranked(names: Sequence[str], trial: _Trial, progress: Progress) -> list[str]:
    """The layers by the error of the model in which each is mixed alone, the least first."""
    alone = {}
    for done, name in enumerate(names):
        alone[name] = trial.error((name,))
        progress(done + 1, 2 * len(names))
    return sorted(names, key=lambda name: alone[name])


class _Trial:
    """Errors of the model with some of its layers mixed."""

    def __init__(
        self,
        model: ir.Model,
        stats: Mapping[str, Observer],
        samples: Sequence[Sample],
        outputs: Sequence[Sample],
        recipe: Recipe,
    ) -> None:
        mixed, names = recipe.mixed, [str(value.name) for value in model.graph.outputs]
        if not samples:
            raise RecipeError(
                "Layers cannot be chosen by their error without samples.",
                where="mixed.threshold",
                expected="calibration data, and verify.samples above 0",
            )
        if mixed.output >= len(names):
            raise RecipeError(
                "The model has no such output.",
                where="mixed.output",
                observed=mixed.output,
                expected=f"0 to {len(names) - 1}: {', '.join(names)}",
            )
        assert mixed.threshold is not None
        self._model, self._stats, self._recipe = model, stats, recipe
        self._samples, self._wanted = samples, [given[names[mixed.output]] for given in outputs]
        self._name, self._distance = names[mixed.output], DISTANCES[mixed.metric]
        self._flip = -1.0 if mixed.metric in IN_DECIBELS else 1.0
        self.limit = self._flip * mixed.threshold

    def plan(self, chosen: Sequence[str]) -> QuantPlan:
        """The plan with these layers mixed."""
        return build_plan(self._model, with_mixed(self._recipe, chosen))

    def error(self, chosen: Sequence[str]) -> float:
        """The mean distance of the output from the float model's."""
        recipe = self._recipe
        state = refine(self._model, resolve(self._model, self.plan(chosen), self._stats, recipe), recipe.npu)
        written = write_qdq(self._model, state, recipe)
        simulate(written, state, recipe.npu)
        session = open_session(written, simulate=True)
        total = 0.0
        for index, (sample, wanted) in enumerate(zip(self._samples, self._wanted, strict=True)):
            given = run_session(session, [self._name], sample, index)[self._name]
            total += self._distance(wanted, given)
        return total / len(self._samples)

    def finished(self, error: float) -> bool:
        """Whether no further layer is wanted: quality is reached, or there is no room for speed."""
        return error <= self.limit if self._recipe.mixed.goal == "quality" else error > self.limit

    def words(self, error: float) -> str:
        """An error as people give it."""
        unit = " dB" if self._flip < 0 else ""
        return f"{self._recipe.mixed.metric} {self._flip * error:.4g}{unit}"
