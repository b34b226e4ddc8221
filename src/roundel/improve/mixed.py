"""Which layers take the second element type: tried one by one, then together, from the kindest on.

Goal speed: the second type is the cheap one, and layers take it as long as the error stays within the limit.
Goal quality: it is the better one, and layers take it until the error is within.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from roundel.calibrate.positions import refine
from roundel.calibrate.resolve import resolve
from roundel.calibrate.runner import run_session
from roundel.errors import RecipeError
from roundel.improve.probe import session_of
from roundel.numerics.metrics import DISTANCES, IN_DECIBELS
from roundel.plan import QuantPlan, build_plan
from roundel.plan.build import candidates, with_mixed
from roundel.state import State
from roundel.types import Listener


def mix_layers(state: State, told: Listener) -> State:
    """Choose the layers of a recipe with a threshold: the state with the plan in which they are mixed.

    Args:
        state: collected: its plan observes or watches all that any choice needs.
        told: hears about progress.

    Raises:
        RecipeError: there is no such output, or nothing to judge by.
    """
    recipe, trial = state.recipe, _Trial(state)
    names = candidates(state.model.graph, trial.plan(()).nodes, recipe.mixed)
    told.step("choose mixed layers", 2 * len(names))
    start = error = trial.error(())
    chosen: tuple[str, ...] = ()
    for name in () if trial.finished(start) else _ranked(names, trial, told):
        tried = trial.error((*chosen, name))
        if recipe.mixed.goal == "speed" and tried > trial.limit:
            break
        chosen, error = (*chosen, name), tried
        told.advance(len(names) + len(chosen))
        if trial.finished(error):
            break
    kind, moved = recipe.mixed.type, f"{trial.words(start)} -> {trial.words(error)}"
    reached = "within" if error <= trial.limit else "not within"
    story = f"{len(chosen)} of {len(names)} layers in {kind}: {moved}, {reached} {trial.words(trial.limit)}"
    return replace(state, plan=trial.plan(chosen)).noted(f"mixed precision: {story}")


def _ranked(names: Sequence[str], trial: _Trial, told: Listener) -> list[str]:
    """The layers by the error of the model in which each is mixed alone, the least first."""
    alone = {}
    for done, name in enumerate(names):
        alone[name] = trial.error((name,))
        told.advance(done + 1)
    return sorted(names, key=lambda name: alone[name])


class _Trial:
    """Errors of the model with some of its layers mixed."""

    def __init__(self, state: State) -> None:
        count, mixed = state.recipe.verify.samples, state.recipe.mixed
        samples, names = state.inputs[:count], [str(value.name) for value in state.model.graph.outputs]
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
        self._state, self._samples = state, samples
        self._wanted = [given[names[mixed.output]] for given in state.outputs[:count]]
        self._name, self._distance = names[mixed.output], DISTANCES[mixed.metric]
        self._flip = -1.0 if mixed.metric in IN_DECIBELS else 1.0
        self.limit = self._flip * mixed.threshold

    def plan(self, chosen: Sequence[str]) -> QuantPlan:
        """The plan with these layers mixed."""
        return build_plan(self._state.model, with_mixed(self._state.recipe, chosen))

    def error(self, chosen: Sequence[str]) -> float:
        """The mean distance of the output from the float model's."""
        model, recipe = self._state.model, self._state.recipe
        state = refine(model, resolve(replace(self._state, plan=self.plan(chosen))), recipe.npu)
        session = session_of(model, state, recipe)
        total = 0.0
        for index, (sample, wanted) in enumerate(zip(self._samples, self._wanted, strict=True)):
            given = run_session(session, [self._name], sample, index)[self._name]
            total += self._distance(wanted, given)
        return total / len(self._samples)

    def finished(self, error: float) -> bool:
        """Whether no further layer is wanted: quality is reached, or there is no room for speed."""
        return error <= self.limit if self._state.recipe.mixed.goal == "quality" else error > self.limit

    def words(self, error: float) -> str:
        """An error as people give it."""
        unit = " dB" if self._flip < 0 else ""
        return f"{self._state.recipe.mixed.metric} {self._flip * error:.4g}{unit}"
