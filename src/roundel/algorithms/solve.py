"""One layer: the best codes for its weights and its bias, given what it sees and what it should give."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundel.algorithms.moments import Centred, Moments
from roundel.numerics.rounding import compensated, damped, descend, factor, least_squares
from roundel.types import Doubles, QParams

_RIDGES = (1.0, 0.1, 0.01)
_DAMPING = 0.3
_SWEEPS = 3
_TRIED = 3  # scales that a layer is solved with


@dataclass(frozen=True, slots=True)
class Problem:
    """A layer's numbers.

    Attributes:
        weight: (G, O, K) float weights.
        bias: (G, O) float bias; zeros where the layer has none.
        has_bias: whether the layer has one, so that an offset can be corrected.
        input_scale: step of the input codes; moments count in codes.
        params: the weight's scale so far, shaped to broadcast against (G, O, 1).
        limits: smallest and largest weight code.
        factors: candidate factors on the weight's scale.
        train, held: moments to solve on and to judge by.
        importance: (G, O), how much an output's error counts against another's.
    """

    weight: Doubles
    bias: Doubles
    has_bias: bool
    input_scale: float
    scale: Doubles
    limits: tuple[int, int]
    factors: tuple[float, ...]
    train: Moments
    held: Moments
    importance: Doubles | float = 1.0


@dataclass(frozen=True, slots=True)
class Solution:
    """What became of a layer.

    Attributes:
        codes: (G, O, K) weight codes.
        scale: as in the problem.
        bias: (G, O) float bias that goes with the codes.
        before, after: held-out mean squared error with plain rounding and with this solution.
        ridge: how far the weights moved towards the seen inputs; None where they stayed.
    """

    codes: Doubles
    scale: Doubles
    bias: Doubles
    before: float
    after: float
    ridge: float | None

    @property
    def kept(self) -> bool:
        """Whether it is better than plain rounding on data that it was not made from."""
        return self.after < self.before


def solve(problem: Problem) -> Solution:
    """Least-squares target, compensated rounding, coordinate descent, bias; judged on held-out rows."""
    train, held = problem.train.centred(), problem.held.centred()
    float_weight = problem.weight * problem.input_scale
    ridge = _choose_ridge(float_weight, train, held, problem.importance)
    target = float_weight if ridge is None else least_squares(float_weight, train.xx, train.xy, ridge)
    codes, scale = _best_codes(problem, target, train)
    real = codes * (scale * problem.input_scale)
    bias = train.y - np.einsum("gok,gk->go", real, train.x) if problem.has_bias else problem.bias
    plain = _plain(problem)
    return Solution(
        codes,
        scale,
        bias,
        before=float((held.error(plain, problem.bias) * problem.importance).sum()),
        after=float((held.error(real, bias) * problem.importance).sum()),
        ridge=ridge,
    )


def _plain(problem: Problem) -> Doubles:
    codes = np.clip(np.rint(problem.weight / problem.scale), *problem.limits)
    return np.asarray(codes * (problem.scale * problem.input_scale))


def _choose_ridge(
    weight: Doubles, train: Centred, held: Centred, importance: Doubles | float
) -> float | None:
    """The weakest tie to the float weights that still pays on held-out rows; None for no move at all."""
    best, error = None, _spread(weight, held, importance)
    for ridge in _RIDGES:
        tried = _spread(least_squares(weight, train.xx, train.xy, ridge), held, importance)
        if tried >= error:
            break
        best, error = ridge, tried
    return best


def _spread(weight: Doubles, moments: Centred, importance: Doubles | float) -> float:
    each = np.einsum("gok,gok->go", weight @ moments.xx - 2 * moments.xy, weight) + moments.yy
    return float((each * importance).sum())


def _best_codes(problem: Problem, target: Doubles, seen: Centred) -> tuple[Doubles, Doubles]:
    """Codes and scale with the least error over the candidates."""
    moment = damped(seen.xx, _DAMPING)
    upper = factor(moment)
    found: list[tuple[Doubles, Doubles, Doubles]] = []
    for scale in _promising(problem, target, moment):
        wanted = target / (scale * problem.input_scale)
        codes = compensated(wanted, upper, problem.limits)
        miss = (codes - wanted) * scale
        found.append((np.einsum("gok,gok->go", miss @ moment, miss), codes, scale))
    codes, scale = _choose(problem, found)
    wanted = target / (scale * problem.input_scale)
    return descend(codes, wanted, moment, problem.limits, _SWEEPS), scale


def _choose(problem: Problem, found: list[tuple[Doubles, Doubles, Doubles]]) -> tuple[Doubles, Doubles]:
    """The candidate (error of each output, codes, scale) with the least error."""
    if problem.scale.size == 1:
        _, codes, scale = min(found, key=lambda item: float((item[0] * problem.importance).sum()))
        return codes, scale
    # One scale for each output: each takes the candidate that suits it best.
    choice = np.argmin([item[0] for item in found], axis=0)
    codes, scale = found[0][1].copy(), np.broadcast_to(found[0][2], (*choice.shape, 1)).copy()
    for index, (_, tried, step) in enumerate(found):
        chosen = choice == index
        codes[chosen] = tried[chosen]
        scale[chosen] = np.broadcast_to(step, scale.shape)[chosen]
    return codes, scale


def _promising(problem: Problem, target: Doubles, moment: Doubles) -> list[Doubles]:
    """The candidates worth a solution: the best by what plain rounding costs if inputs are uncorrelated."""
    scales = [np.asarray(problem.scale * factor) for factor in problem.factors]
    if len(scales) <= _TRIED or problem.scale.size > 1:
        return scales[:_TRIED]
    power = np.einsum("gkk->gk", moment)
    costs = []
    for scale in scales:
        wanted = target / (scale * problem.input_scale)
        miss = (np.clip(np.rint(wanted), *problem.limits) - wanted) * scale
        each = np.einsum("gok,gk->go", np.square(miss), power)
        costs.append(float((each * problem.importance).sum()))
    return [scales[index] for index in np.argsort(costs, kind="stable")[:_TRIED]]


def with_scale(params: QParams, scale: NDArray[Any]) -> QParams:
    """The same parameters with another scale of the same shape."""
    shaped = np.asarray(scale, np.float32).reshape(params.scale.shape)
    return replace(params, scale=shaped)
