"""Rounding layer by layer: the best codes and bias, given what a layer sees and what it should give."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.improve.constants import Changed, Constants, Written
from roundel.improve.layers import quantized_layers
from roundel.improve.memory import load_layer, save_layer
from roundel.improve.moments import Centred, Moments
from roundel.improve.stepwise import StepwiseRunner
from roundel.improve.targets import SampledTargets, float_targets, importance, visible_ranges
from roundel.model.layers import Layer
from roundel.numerics.affine import quantize
from roundel.numerics.metrics import layer_db
from roundel.numerics.rounding import compensated, damped, descend, factor, least_squares, one_blas_thread
from roundel.plan.types import Fixed
from roundel.recipe.settings import Recipe
from roundel.state import LayerReport, State, held_from
from roundel.types import Doubles, Listener, QParams, QType, Sample, ScaleKind
from roundel.work.checkpoints import Memory

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
        has_bias: whether it has one number for each output, so that offsets can be corrected.
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


_CHUNK = 2048  # rows added up in float32 before they join the float64 sums
_CHUNK_ELEMENTS = 2_000_000  # fewer rows where they have more in all, but no fewer than a sum has columns
_UNSEEN = 0.1  # weight of a row whose output is cut off
_FLOAT_FACTORS = (1.0, 0.85, 0.7, 0.6, 0.5, 0.4)
_POWER_FACTORS = (2.0, 1.0, 0.5, 0.25)


@one_blas_thread()
def choose_rounding(
    model: ir.Model,
    state: State,
    samples: Sequence[Sample],
    recipe: Recipe,
    progress: Listener | None = None,
    memory: Memory | None = None,
) -> tuple[State, tuple[LayerReport, ...]]:
    """Choose rounding, weight scales and biases layer by layer.

    Args:
        model: the prepared float model.
        state: calibrated, and legal for its target.
        samples: a few dozen to a few hundred inputs; the last fifth judges.
        recipe: formats and limits.
        progress: told the number of layers, and how many are done.
        memory: holds each layer when it is done; what it has is not solved again.
    """
    layers = quantized_layers(model.graph, state.plan)
    if not layers or len(samples) < 2:
        return state, ()
    if progress is not None:
        progress.step("round layer by layer", len(layers))
    targets = float_targets(model, layers, samples)
    work = _LayerByLayer(model, state, samples, recipe)
    reports = []
    for done, layer in enumerate(layers, 1):
        reports.append(work.remembered(layer, targets[done - 1], done, memory))
        targets[done - 1] = []  # not needed any more
        if progress is not None:
            progress.advance(done)
    return work.state, tuple(reports)


class _LayerByLayer:
    def __init__(self, model: ir.Model, state: State, samples: Sequence[Sample], recipe: Recipe) -> None:
        self.constants, self.written = Constants(model.graph, state, recipe), Written(model, state, recipe)
        self.runner = StepwiseRunner(self.written.model, samples)
        self.importance = importance(model.graph)
        self.visible = visible_ranges(model.graph)
        self.held_from = held_from(len(samples))

    @property
    def state(self) -> State:
        """With the layers that are done."""
        return self.constants.state

    def remembered(
        self, layer: Layer, targets: Sequence[SampledTargets], number: int, memory: Memory | None
    ) -> LayerReport:
        """Take one layer over from an earlier run, or solve it and write it down."""
        known = None if memory is None else load_layer(memory, number)
        # The same pieces of the model run as in a run without a break: later layers see the same bits.
        codes = self.runner.run_to(self.written.codes_of(layer.data))
        report, changed = known or self.improve(layer, codes, targets)
        self.constants.take(changed)
        self.written.replace(changed)
        if memory is not None and known is None:
            save_layer(memory, number, report, changed)
        self.runner.release()
        return report

    def improve(
        self, layer: Layer, codes: Sequence[NDArray[Any]], targets: Sequence[SampledTargets]
    ) -> tuple[LayerReport, Changed]:
        """Solve one layer; its new constants where held-out data agrees."""
        start = time.perf_counter()
        problem = self._problem(layer, codes, targets)
        power = float(problem.held.centred().yy.sum())
        solution = solve(problem)
        changed = self._changes(layer, solution) if solution.kept else {}
        after = solution.after if solution.kept else solution.before
        took = time.perf_counter() - start
        ratios = [layer_db(power, error) for error in (solution.before, after)]
        return LayerReport(layer.name, layer.op, ratios[0], ratios[1], solution.kept, took), changed

    def _problem(
        self, layer: Layer, codes: Sequence[NDArray[Any]], targets: Sequence[SampledTargets]
    ) -> Problem:
        given, weight = self.state.params[layer.data], self.state.params[layer.weight]
        train, held = self._moments(layer, codes, targets, int(given.zero_point))
        matrix = layer.matrix(self.constants.float(layer.weight)).astype(np.float64)
        bias = np.zeros(1) if layer.bias is None else self.constants.float(layer.bias).reshape(-1)
        rows = matrix.shape[0] * matrix.shape[1]
        return Problem(
            weight=matrix,
            bias=np.broadcast_to(bias.astype(np.float64), rows).reshape(matrix.shape[:2]),
            has_bias=layer.bias is not None and bias.size == rows,
            input_scale=float(given.scale),
            scale=_shaped(weight, matrix.shape),
            limits=_limits(weight, self.state.plan.tensors[layer.weight].integer.symmetric),
            factors=self._factors(layer, weight),
            train=train,
            held=held,
            importance=self._importance(layer, matrix.shape[:2]),
        )

    def _importance(self, layer: Layer, shape: tuple[int, int]) -> NDArray[np.float64]:
        known = self.importance.get(layer.output)
        return np.ones(shape) if known is None or known.size != np.prod(shape) else known.reshape(shape)

    def _moments(
        self, layer: Layer, codes: Sequence[NDArray[Any]], targets: Sequence[SampledTargets], zero: int
    ) -> tuple[Moments, Moments]:
        sums = Moments(), Moments()
        seen = self.visible.get(layer.output) if layer.groups > 1 else None
        rows: list[tuple[NDArray[Any], NDArray[Any]]] = []
        for index, (array, target) in enumerate(zip(codes, targets, strict=True)):
            given = layer.inputs(array, target.places, target.spatial, zero)
            rows.append((given.astype(np.float32) - np.float32(zero), target.values))
            last = index + 1 in (self.held_from, len(codes))
            if last or sum(len(x) for x, _ in rows) >= _enough(*rows[0][0].shape[1:]):
                x, y = (np.concatenate(part) for part in zip(*rows, strict=True))
                sums[index >= self.held_from].add(x, y, _weights(y, seen))
                rows = []
        return sums

    def _factors(self, layer: Layer, weight: QParams) -> tuple[float, ...]:
        """Factors on the weight's scale that its format, the user and the NPU's shifters allow."""
        if isinstance(self.state.plan.tensors[layer.weight].source, Fixed):
            return (1.0,)
        if self.state.plan.tensors[layer.weight].integer.scale is not ScaleKind.POWER_OF_TWO:
            return _FLOAT_FACTORS
        limits = self.constants.limits.get(layer.name)
        if limits is None:
            return _POWER_FACTORS
        return tuple(f for f in _POWER_FACTORS if limits.allows_weight(float(weight.scale) * f)) or (1.0,)

    def _changes(self, layer: Layer, solution: Solution) -> Changed:
        weight = self.state.params[layer.weight]
        scaled = replace(weight, scale=np.asarray(_unshaped(solution.scale, weight), np.float32))
        whole = layer.tensor(solution.codes, self.constants.float(layer.weight).shape)
        changed: Changed = {layer.weight: (whole.astype(weight.qtype.dtype), scaled)}
        if layer.bias is not None:
            params = self._bias_params(layer, layer.bias, solution, scaled)
            stored = self.constants.float(layer.bias)  # of one number for all rows, one is written
            real = solution.bias.reshape(-1)[: stored.size].reshape(stored.shape)
            changed[layer.bias] = (quantize(real, params, narrow=True), params)
        return changed

    def _bias_params(self, layer: Layer, bias: str, solution: Solution, weight: QParams) -> QParams:
        old = self.state.params[bias]
        if old.qtype in (QType.INT32, QType.INT16):
            step = solution.scale.reshape(solution.scale.shape[:2]) * float(
                self.state.params[layer.data].scale
            )
            scale = step if old.scale.ndim else step.reshape(-1)[0]
            return replace(old, scale=np.asarray(scale, np.float32).reshape(old.scale.shape))
        return self.constants.best_bias_scale(layer.name, solution.bias, old, weight)


def _enough(groups: int, size: int) -> int:
    """Rows of so many groups and columns that are worth adding up."""
    return min(_CHUNK, max(size, _CHUNK_ELEMENTS // (groups * size)))


def _weights(wanted: NDArray[Any], seen: tuple[float, float] | None) -> NDArray[np.float32] | None:
    """Rows whose output the activation behind the layer cuts off count less; only where each output has
    moments of its own.
    """
    if seen is None or wanted.shape[2] != 1:
        return None
    low, high = seen
    inside = (wanted[:, :, 0] > low) & (wanted[:, :, 0] < high)
    return np.where(inside, np.float32(1), np.float32(_UNSEEN))


def _shaped(params: QParams, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """The scale so that it broadcasts against (G, O, K)."""
    scale = params.scale.astype(np.float64)
    if scale.ndim == 0:
        return scale.reshape(1, 1, 1)
    if scale.size == shape[0] * shape[1]:
        return scale.reshape(shape[0], shape[1], 1)
    return np.broadcast_to(scale.reshape(1, -1, 1), (shape[0], shape[1], 1)).copy()


def _unshaped(scale: NDArray[np.float64], params: QParams) -> NDArray[np.float64]:
    flat = scale.reshape(-1)
    return flat[: params.scale.size].reshape(params.scale.shape)


def _limits(params: QParams, symmetric: bool) -> tuple[int, int]:
    zero = int(params.zero_point.reshape(-1)[0])
    low = params.qtype.qmin + (1 if symmetric and params.qtype.signed else 0)
    return low - zero, params.qtype.qmax - zero
