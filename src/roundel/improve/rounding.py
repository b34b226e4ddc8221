"""Rounding layer by layer: the best codes and bias, given what a layer sees and what it should give."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.improve.constants import Changed, Constants, Written
from roundel.improve.layers import quantized_layers
from roundel.improve.memory import load_layer, save_layer
from roundel.improve.moments import HeldRows, Missing, Moments, Single, in_parts, means, parts_of
from roundel.improve.stepwise import StepwiseRunner
from roundel.improve.targets import SampledTargets, float_targets, importance, visible_ranges
from roundel.model.layers import Layer
from roundel.numerics.affine import quantize
from roundel.numerics.metrics import layer_db
from roundel.numerics.rounding import (
    apart,
    compensated,
    correction,
    damped,
    descend,
    handed_on,
    one_blas_thread,
    shrunk,
    taken_together,
)
from roundel.plan.stream import stream_tensors
from roundel.plan.types import Fixed
from roundel.recipe.settings import Recipe
from roundel.state import LayerReport, State, held_from
from roundel.types import Doubles, FloatArray, Listener, QParams, QType, Sample, ScaleKind
from roundel.work.checkpoints import Memory
from roundel.work.executors import in_turn

_RIDGES = (1.0, 0.1, 0.01)
_DAMPING = 0.3
_SWEEPS = 2
_WORTH_A_THREAD = 20_000  # weights
_TRIED = 3  # scales that a layer is solved with
_FEW_OUTPUTS = 4  # times as many inputs
_ASKED = 64  # outputs of a layer that choose its ridge and scale
_MOST_APART = 32  # places of one sample that tell something that the others do not
_LARGEST = 16  # of them for their large weights


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
        train: moments to solve on.
        held: rows to judge by.
        importance: (G, O), how much an output's error counts against another's.
        single: what the samples to solve on say one by one; None where they are taken at their word.
    """

    weight: Doubles
    bias: Doubles
    has_bias: bool
    input_scale: float
    scale: Doubles
    limits: tuple[int, int]
    factors: tuple[float, ...]
    train: Moments
    held: HeldRows
    importance: Doubles | float = 1.0
    single: Single | None = None


@dataclass(frozen=True, slots=True)
class Solution:
    """What became of a layer.

    Attributes:
        codes: (G, O, K) weight codes.
        scale: as in the problem.
        bias: (G, O) float bias that goes with the codes.
        before, after: held-out mean squared error with plain rounding and with this solution.
        power: of the wanted outputs, on the same rows.
        ridge: how far the weights moved towards the seen inputs; None where they stayed.
    """

    codes: Doubles
    scale: Doubles
    bias: Doubles
    before: float
    after: float
    power: float
    ridge: float | None

    @property
    def kept(self) -> bool:
        """Whether it is better than plain rounding on data that it was not made from."""
        return self.after < self.before


def solve(problem: Problem, aside: ThreadPoolExecutor | None = None) -> Solution:
    """Least-squares target, compensated rounding, coordinate descent, bias; judged on held-out rows.

    Args:
        problem: the layer.
        aside: takes what can be done beside the rest.
    """
    weight = _turned(problem.weight * problem.input_scale)
    plain = np.clip(np.rint(problem.weight / problem.scale), *problem.limits)
    plain *= problem.scale * problem.input_scale
    moments = problem.train if problem.has_bias else problem.train.from_zero()
    train, held = moments.around(weight), problem.held
    if problem.weight.size < _WORTH_A_THREAD:
        aside = None
    factored = _begun(aside, partial(_factored, problem, train))
    before = _begun(aside, partial(held.error, _turned(plain), problem.bias))
    ridge, change = _choose_ridge(problem, weight, train)
    target = weight if ridge is None else weight + change
    codes, scale = _best_codes(problem, target, factored())
    real, bias = _turned(codes * (scale * problem.input_scale)), problem.bias
    if problem.has_bias:
        bias = train.offset - np.einsum("gko,gk->go", real - weight, train.mean)
        if problem.single is not None:
            bias = problem.bias + problem.single.common(real, problem.bias) * (bias - problem.bias)
    after = held.error(real, bias)
    return Solution(
        codes,
        scale,
        bias,
        before=float((before() * problem.importance).sum()),
        after=float((after * problem.importance).sum()),
        power=float(held.spread(held.y).sum()),
        ridge=ridge,
    )


_T = TypeVar("_T")


def _begun(pool: ThreadPoolExecutor | None, work: Callable[[], _T]) -> Callable[[], _T]:
    """What hands out the result: of work that has begun in another thread, or that is done when asked for."""
    return work if pool is None else pool.submit(work).result


def _turned(matrix: NDArray[Any]) -> NDArray[np.float32]:
    """(G, O, K) as (G, K, O), or back."""
    return np.ascontiguousarray(matrix.transpose(0, 2, 1), np.float32)


def _choose_ridge(
    problem: Problem, weight: NDArray[np.float32], train: Missing
) -> tuple[float | None, FloatArray]:
    """The weakest tie to the float weights that still pays on held-out rows, and how it changes them.

    None for no move at all. Some of the outputs tell which: they share their inputs.
    """
    best, found = None, np.zeros((1, 1, 1), np.float32)
    if problem.train.parts > 1:
        return best, found
    held, outputs = problem.held, problem.weight.shape[1]
    spread = held.spread if problem.has_bias else held.power
    # Of few outputs all are solved for at once: to factor the moment again would take longer.
    some = slice(None) if _FEW_OUTPUTS * outputs <= weight.shape[1] else _some(outputs)
    missed = held.missed(weight[:, :, some], some)
    heavy = np.broadcast_to(problem.importance, problem.weight.shape[:2])[:, some]
    error = float((spread(missed) * heavy).sum())
    for ridge in _RIDGES:
        change = correction(train.moment, train.cross[:, :, some], ridge)
        tried = float((spread(missed - held.x @ change) * heavy).sum())
        if tried >= error:
            break
        best, error, found = ridge, tried, change
    if best is not None and found.shape[2] < outputs:
        found = correction(train.moment, train.cross, best)
    return best, found


def _some(outputs: int) -> slice:
    """Outputs that stand for all."""
    return slice(None, None, -(-outputs // _ASKED))


@dataclass(frozen=True, slots=True, eq=False)
class _Factored:
    """How inputs make up for each other.

    Attributes:
        moment: as far as it is trusted, in the order in which inputs are rounded.
        shares: what each input hands on.
        together: inputs that are rounded at once.
        order: of the inputs.
    """

    moment: FloatArray
    shares: FloatArray
    together: int
    order: NDArray[np.intp]


def _factored(problem: Problem, seen: Missing) -> _Factored:
    trusted = seen.moment if problem.single is None else shrunk(seen.moment, problem.single.rows)
    moment = damped(trusted, _DAMPING)
    together = taken_together(moment.shape[1])
    order = apart(moment.shape[1], together)
    if together > 1:
        moment = moment.take(order, 1).take(order, 2)
    return _Factored(moment, handed_on(moment), together, order)


def _best_codes(problem: Problem, target: FloatArray, factored: _Factored) -> tuple[Doubles, Doubles]:
    """Codes and scale with the least error over the candidates."""
    aimed = in_parts(target, problem.train.parts)
    if factored.together > 1:
        aimed = aimed.take(factored.order, 1)
    scales = _promising(problem, aimed, factored.moment)
    scale = _choose(problem, scales, aimed, factored) if len(scales) > 1 else scales[0]
    wanted = aimed / _along(scale * problem.input_scale, problem)
    start = compensated(wanted, factored.shares, problem.limits, factored.together)
    codes = descend(start, wanted, factored.moment, problem.limits, _SWEEPS, factored.together)
    back = np.argsort(factored.order, kind="stable")
    whole = codes.take(back, 1).reshape(len(target), -1, target.shape[2])[:, : target.shape[1]]
    return whole.transpose(0, 2, 1).astype(np.float64), scale


def _along(scale: Doubles, problem: Problem) -> NDArray[np.float32]:
    """A scale that goes with (G, O, 1), so that it goes with (G, K, O) in parts."""
    turned = scale.transpose(0, 2, 1).astype(np.float32)
    return np.repeat(turned, problem.train.parts, 0) if len(turned) > 1 else turned


def _choose(problem: Problem, scales: Sequence[Doubles], target: FloatArray, factored: _Factored) -> Doubles:
    """The candidate with the least error; where each output has its own, each takes what suits it best.

    One scale for all is chosen by some of the outputs: those of the largest weights, which it may cut off,
    and others that stand for the rest.
    """
    groups, outputs, _ = problem.weight.shape
    alone = problem.scale.size > 1
    asked, counts = np.arange(outputs), np.ones(outputs)
    if not alone and groups == 1 and outputs > 2 * _ASKED:
        order = np.argsort(-np.abs(problem.weight[0]).max(1), kind="stable")
        rest = np.sort(order[_LARGEST:])[_some(outputs)]
        asked = np.concatenate([order[:_LARGEST], rest])
        counts = np.concatenate([np.ones(_LARGEST), np.full(len(rest), (outputs - _LARGEST) / len(rest))])
    some = target[:, :, asked]
    units = [_along(scale * problem.input_scale, problem) for scale in scales]
    units = [unit if unit.shape[2] == 1 else unit[:, :, asked] for unit in units]
    wanted = np.concatenate([some / unit for unit in units], axis=2)
    missed = compensated(wanted, factored.shares, problem.limits, factored.together) - wanted
    each = np.einsum("gko,gko->go", factored.moment @ missed, missed, dtype=np.float64)
    each = each.reshape(groups, problem.train.parts, len(scales), -1).sum(1)  # (G, candidates, asked)
    each *= np.stack([np.square(np.broadcast_to(u[:groups, 0], each[:, 0].shape)) for u in units], 1)
    if not alone:
        heavy = np.broadcast_to(problem.importance, problem.weight.shape[:2])[:, asked] * counts
        return scales[int(np.argmin((each * heavy[:, None]).sum((0, 2))))]
    best = each.argmin(1)[:, None, :, None]
    stacked = np.stack([np.broadcast_to(scale, (groups, outputs, 1)) for scale in scales], 1)
    return np.take_along_axis(stacked, best, 1)[:, 0]


def _promising(problem: Problem, target: FloatArray, moment: FloatArray) -> list[Doubles]:
    """The candidates worth a solution: the best by what plain rounding costs if inputs are uncorrelated."""
    scales = [np.asarray(problem.scale * factor) for factor in problem.factors]
    if len(scales) <= _TRIED or problem.scale.size > 1:
        return scales[:_TRIED]
    power = np.einsum("gkk->gk", moment)
    costs = []
    for scale in scales:
        unit = np.float32(scale.item() * problem.input_scale)
        wanted = target / unit
        miss = np.clip(np.rint(wanted), *problem.limits) - wanted
        each = (power[:, None] @ np.square(miss))[:, 0].reshape(len(problem.weight), problem.train.parts, -1)
        costs.append(float((each.sum(1) * problem.importance).sum()) * float(unit) ** 2)
    return [scales[index] for index in np.argsort(costs, kind="stable")[:_TRIED]]


_CHUNK = 2048  # rows added up in float32 before they join the float64 sums
_CHUNK_ELEMENTS = 2_000_000  # fewer rows where they have more in all, but no fewer than a sum has columns
_THREADS = 2
_UNSEEN = 0.1  # weight of a row whose output is cut off
_QUIET = 0.1  # of the usual power: rows with less count no more
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
    targets = float_targets(state.truth, layers, samples)
    reports = []
    with ThreadPoolExecutor(_THREADS) as pool:
        work = _LayerByLayer(model, state, samples, recipe, pool)
        for done, layer in enumerate(layers, 1):
            reports.append(work.remembered(layer, targets[done - 1], done, memory))
            targets[done - 1] = []  # not needed any more
            if progress is not None:
                progress.advance(done)
    return work.state, tuple(reports)


class _LayerByLayer:
    def __init__(
        self,
        model: ir.Model,
        state: State,
        samples: Sequence[Sample],
        recipe: Recipe,
        pool: ThreadPoolExecutor,
    ) -> None:
        self.constants, self.written = Constants(model.graph, state, recipe), Written.of(model, state, recipe)
        self.runner = StepwiseRunner(self.written.model, samples)
        self.importance = importance(model.graph)
        self.visible = visible_ranges(model.graph)
        self.stream = stream_tensors(model.graph)
        self.held_from = held_from(len(samples))
        self.pool = pool

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
        solution = solve(problem, self.pool)
        changed = self._changes(layer, solution) if solution.kept else {}
        after = solution.after if solution.kept else solution.before
        took = time.perf_counter() - start
        ratios = [layer_db(solution.power, error) for error in (solution.before, after)]
        return LayerReport(layer.name, layer.op, ratios[0], ratios[1], solution.kept, took), changed

    def _problem(
        self, layer: Layer, codes: Sequence[NDArray[Any]], targets: Sequence[SampledTargets]
    ) -> Problem:
        given, weight = self.state.params[layer.data], self.state.params[layer.weight]
        matrix = layer.matrix(self.constants.float(layer.weight)).astype(np.float64)
        train, held, single = self._moments(layer, codes, targets, matrix.shape[2])
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
            single=single,
        )

    def _importance(self, layer: Layer, shape: tuple[int, int]) -> NDArray[np.float64]:
        known = self.importance.get(layer.output)
        return np.ones(shape) if known is None or known.size != np.prod(shape) else known.reshape(shape)

    def _moments(
        self, layer: Layer, codes: Sequence[NDArray[Any]], targets: Sequence[SampledTargets], size: int
    ) -> tuple[Moments, HeldRows, Single]:
        """Of the samples that teach and of those that judge. Sums join in the samples' order."""
        zero = int(self.state.params[layer.data].zero_point)
        seen = self.visible.get(layer.output) if layer.groups > 1 else None
        normed = layer.groups == 1 and layer.output in self.stream
        parts = parts_of(size)

        def rows(chunk: range) -> HeldRows:
            ends = np.cumsum([0, *(len(targets[i].places) for i in chunk)])
            x = np.empty((layer.groups, ends[-1], size), np.float32)
            for i, start, stop in zip(chunk, ends, ends[1:], strict=False):
                given = layer.inputs(codes[i], targets[i].places, targets[i].spatial, zero)
                np.subtract(given.transpose(1, 0, 2), np.float32(zero), out=x[:, start:stop])
            y = np.ascontiguousarray(np.concatenate([targets[i].values for i in chunk]).transpose(1, 0, 2))
            return HeldRows(x, y, _relative(y) if normed else _weights(y, seen))

        def taught(chunk: range) -> tuple[Moments, tuple[Doubles, Doubles]]:
            given, found = rows(chunk), Moments(parts)
            found.add(given.x, given.y, given.weights)
            each = counts[chunk.start : chunk.stop]
            return found, (means(given.x, each), means(given.y, each))

        held = self.pool.submit(rows, range(self.held_from, len(targets)))
        counts = [len(target.places) for target in targets[: self.held_from]]
        enough = min(_enough(layer.groups * parts, -(-size // parts)), -(-sum(counts) // _THREADS))
        train, single = Moments(parts), []
        for found, each in in_turn(self.pool, taught, _chunks(counts, enough), _THREADS):
            train.merge(found)
            single.append(each)
        apart = sum(min(count, _MOST_APART) for count in counts)
        x, y = (np.concatenate(side) for side in zip(*single, strict=True))
        return train, held.result(), Single(x, y, apart)

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
        codes = solution.codes + int(weight.zero_point.reshape(-1)[0])  # they count from the zero point
        whole = layer.tensor(codes, self.constants.float(layer.weight).shape)
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


def _chunks(rows: Sequence[int], enough: int) -> list[range]:
    """Samples whose rows are added up at once."""
    found, start, total = [], 0, 0
    for index, more in enumerate(rows, 1):
        total += more
        if total >= enough or index == len(rows):
            found.append(range(start, index))
            start, total = index, 0
    return found


def _weights(wanted: NDArray[Any], seen: tuple[float, float] | None) -> NDArray[np.float32] | None:
    """Rows whose output the activation behind the layer cuts off count less; only where each output has
    moments of its own.
    """
    if seen is None or wanted.shape[2] != 1:
        return None
    low, high = seen
    inside = (wanted > low) & (wanted < high)
    return np.where(inside, np.float32(1), np.float32(_UNSEEN))


def _relative(wanted: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows count relative to their own power: a layer norm behind divides by it, however large a row is."""
    power = np.square(wanted).mean(axis=2, keepdims=True)
    usual = np.float32(np.median(power))
    return np.asarray(usual / np.maximum(power, _QUIET * usual)) if usual > 0 else np.ones_like(power)


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
