"""The training of one layer: its steps, its early end, and which codes win."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from roundel.improve.constants import Constants, Format, LayerWeights, Tuned
from roundel.improve.finetune_rows import Rows, layer_seed, solved_codes
from roundel.improve.layers import Unit
from roundel.improve.torch_layer import (
    LayerFeed,
    Part,
    Tensor,
    TorchLayer,
    layer_channel_errors,
    refit_bias,
    tensor,
)
from roundel.improve.torch_learners import LEARNERS, Learner, regulariser_exponent
from roundel.recipe.settings import Finetune
from roundel.types import Doubles

Heard = Callable[[float, float], None]  # the share of the steps that is done, and the relative loss

RATES = {"adaround": 0.1, "adaquant": 1e-5}
_LOOKS = 10
_WATCHED_ROWS = 1024  # enough to see whether the error still falls, few enough to look often
_REFIT_ROWS = 4096
_SPAN = 2  # looks between which a pace is measured
_PATIENCE = 2
_LEAST_GAIN = 1e-3  # of the error: less is not worth more steps
_UNRECORDED = 3  # first steps on a GPU: they set up what a recording cannot
_STEP_ROWS = 128  # of one sample, more or less
_STEP_PASSES = 32  # passes over the weights in a step, in rows that take as long
_GROUPED_COST = 8  # a row of a grouped layer, likewise: it is no product of matrices
_WORTH_HALVING = 5_000_000  # products in a step of a layer
_CLEAR_GAIN = 0.01  # solved codes can be made from all rows, learned ones cannot: these must win clearly


@dataclass(frozen=True, slots=True, eq=False)
class TrainingTask:
    """One layer with everything its tuning needs.

    Attributes:
        unit: the layer.
        weights: its numbers.
        rows: its data.
        constants: rounds biases.
        algorithm: 'adaround' or 'adaquant'.
        settings: of the recipe.
        device: for torch.
    """

    unit: Unit
    weights: LayerWeights
    rows: Rows
    constants: Constants
    algorithm: str
    settings: Finetune
    device: str


@dataclass(frozen=True, slots=True, eq=False)
class TrainingOutcome:
    """A tuned layer.

    Attributes:
        tuned: its constants.
        before, after: held-out mean squared error, summed over channels.
        iterations: steps taken.
        power: variance of the held-out targets, likewise.
    """

    tuned: Tuned
    before: float
    after: float
    iterations: int
    power: float


def tune(task: TrainingTask, heard: Heard) -> TrainingOutcome:
    """Tune one layer and judge it on the rows that it did not learn from."""
    bench, power = TrainingBench(task), task.rows.power()
    solved = solved_codes(task.weights, task.rows)
    now = bench.measured(bench.state_codes, bench.state_bias)
    first = bench.candidate(bench.state_codes if solved is None else tensor(solved.taught, task.device))
    codes, bias, steps = train(task, bench, first, heard)
    learned = bench.candidate(codes, bias)
    before, best = now.error, learned
    if solved is not None:
        whole = bench.candidate(tensor(solved.whole, task.device))
        # The present codes have seen the rows that judge. What that is worth, codes solved with and
        # without them tell.
        before *= max(1.0, first.error / max(whole.error, 1e-30))
        if first.error * (1 - _CLEAR_GAIN) <= learned.error:
            best = replace(whole, error=first.error)
    tuned = Tuned(as_doubles(best.codes), best.stored, best.params)
    return TrainingOutcome(tuned, before, best.error, steps, power)


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """Codes with the bias that suits them, as a real number and as stored; and their held-out error."""

    codes: Tensor
    bias: Tensor
    stored: Doubles
    params: Format | None
    error: float


class TrainingBench:
    """Measures a layer with any codes.

    Args:
        task: the layer; of a part of it, with the part's weights.
        part: which it is.
    """

    def __init__(self, task: TrainingTask, part: Part | None = None) -> None:
        self._task, self._device = task, task.device
        settings, weights = task.settings, task.weights
        self.layer = TorchLayer(weights, task.unit.activation, task.device)
        self.feed = LayerFeed(task.rows, task.device, part)
        self.state_codes, self.state_bias = (
            tensor(weights.codes, self._device),
            tensor(weights.bias, self._device),
        )
        changes = task.algorithm == "adaround" or settings.update_bias
        self._refits = changes and weights.bias_params is not None

    def candidate(self, codes: Tensor, bias: Tensor | None = None) -> Candidate:
        """The codes with their best bias, if biases may change."""
        bias = self.state_bias if bias is None else bias
        if self._refits:
            bias = refit_bias(self.layer, self.feed.teaching(_REFIT_ROWS), codes, bias)
        return self.measured(codes, bias)

    def measured(self, codes: Tensor, bias: Tensor) -> Candidate:
        """The codes with this bias."""
        task = self._task
        stored, params = task.constants.rounded_bias(task.unit.layer, task.weights, as_doubles(bias))
        held = layer_channel_errors(self.layer, self.feed.judging(), codes, tensor(stored, self._device))
        return Candidate(codes, bias, stored, params, float(held.sum()))

    def error(self, learner: Learner) -> float:
        """Error of the rounded layer, with the bias that it would get, on rows that teach nothing."""
        codes, bias = learner.hard_codes(), learner.bias().detach()
        if self._refits:
            bias = refit_bias(self.layer, self._taught, codes, bias, rounds=1)
        return float(layer_channel_errors(self.layer, self._watched, codes, bias).sum())

    @cached_property
    def _taught(self) -> list[tuple[Tensor, Tensor]]:
        return self.feed.teaching(_WATCHED_ROWS)

    @cached_property
    def _watched(self) -> list[tuple[Tensor, Tensor]]:
        return self.feed.watching(_WATCHED_ROWS)


def train(
    task: TrainingTask, bench: TrainingBench, start: Candidate, heard: Heard
) -> tuple[Tensor, Tensor, int]:
    """Follow the gradient: codes and bias of the best look on the way, and the number of steps taken.

    A large layer learns in two halves side by side: its outputs do not depend on each other. How many cores
    there are makes no difference, so that the result is the same everywhere.
    """
    weights = replace(task.weights, codes=as_doubles(start.codes), bias=as_doubles(start.bias))
    task = replace(task, weights=weights)
    axis = _halved_axis(task)
    if axis is None:
        return follow(task, bench, heard)
    middle = weights.shape[axis] // 2
    cuts = slice(None, middle), slice(middle, None)
    parts = [Part(groups=cut) if axis == 0 else Part(outputs=cut) for cut in cuts]

    def half(number: int) -> tuple[Tensor, Tensor, int]:
        told = heard if number == 0 else lambda share, loss: None
        own = _part(task, parts[number])
        return follow(own, TrainingBench(own, parts[number]), told)

    with ThreadPoolExecutor(len(parts)) as pool:
        codes, biases, steps = zip(*pool.map(half, range(len(parts))), strict=True)
    return torch.cat(codes, axis), torch.cat(biases, axis), max(steps)


def _halved_axis(task: TrainingTask) -> int | None:
    """Which axis of the weights is halved: that of groups or of outputs; None where it is not worth it."""
    groups, outputs, size = task.weights.shape
    activation, rows = task.unit.activation, task.rows
    alone = activation is None or (activation.slope is None and activation.op != "Softmax")
    usual = task.algorithm == "adaround" and task.weights.hold is None and task.device == "cpu"
    if not usual or not alone or max(groups, outputs) == 1:
        return None
    each = task.settings.batch_size * min(rows.starts[-1] / (len(rows.starts) - 1), _STEP_ROWS)
    work = groups * outputs * size * (each * (1 if groups == 1 else _GROUPED_COST) + _STEP_PASSES)
    if work < _WORTH_HALVING:
        return None
    return 0 if groups > 1 else 1


def _part(task: TrainingTask, part: Part) -> TrainingTask:
    """A part of the weights."""

    def cut(array: Doubles) -> Doubles:
        groups = part.groups if array.shape[0] > 1 else slice(None)
        return array[groups, part.outputs if array.shape[1] > 1 else slice(None)]

    some = replace(
        task.weights,
        real=cut(task.weights.real),
        codes=cut(task.weights.codes),
        scale=cut(task.weights.scale),
        low=cut(task.weights.low),
        high=cut(task.weights.high),
        bias=task.weights.bias[part.groups, part.outputs],
    )
    return replace(task, weights=some)


def follow(task: TrainingTask, bench: TrainingBench, heard: Heard) -> tuple[Tensor, Tensor, int]:
    """Steps down the gradient from the weights' own codes, until no look is better any more."""
    settings, power = task.settings, max(task.rows.power(), 1e-30)
    learner = LEARNERS[task.algorithm](task.weights, settings, task.device)
    descent = Descent(task, bench, learner)
    watch = LossWatch(settings, task.algorithm)
    best = learner.hard_codes(), learner.bias().detach().clone()
    watch.see(0, bench.error(learner))
    while descent.done < settings.iterations and not watch.stalled:
        descent.go(watch.next(descent.done))
        error = bench.error(learner)
        heard(descent.done / settings.iterations, error / power)
        if watch.see(descent.done, error):
            best = learner.hard_codes(), learner.bias().detach().clone()
    return *best, descent.done


class Descent:
    """One step after the other; on a GPU as a recording, for its kernels take longer to start than to run."""

    def __init__(self, task: TrainingTask, bench: TrainingBench, learner: Learner) -> None:
        settings, device = task.settings, task.device
        self.done, self._bench, self._learner = 0, bench, learner
        generator = torch.Generator().manual_seed(layer_seed(settings.seed, task.unit.layer.name))
        self._draws = bench.feed.draws(generator, settings.iterations, settings.batch_size)
        regularised = task.algorithm == "adaround"
        self._exponents = [
            regulariser_exponent(step, settings) if regularised else None
            for step in range(settings.iterations)
        ]
        rate = RATES[task.algorithm] if settings.learning_rate is None else settings.learning_rate
        on_gpu = device != "cpu"
        self._optimiser = torch.optim.Adam(learner.parameters(), lr=rate, fused=True, capturable=on_gpu)
        self._recording: Recording | None = None
        if on_gpu and bench.feed.even and learner.on_device:
            self._recording = Recording(self._step, self._draws, device)

    def go(self, last: int) -> None:
        """All steps up to this one."""
        for step in range(self.done, last):
            if self._recording is None:
                self._step(self._draws[step], self._exponents[step])
            else:
                self._recording.step(self._exponents[step])
        self.done = last

    def _step(self, drawn: Tensor, exponent: int | None) -> None:
        self._learner.learn(self._bench.layer, *self._bench.feed.batch(drawn), exponent)
        self._optimiser.step()


class Recording:
    """Steps on a GPU, recorded once for each exponent and replayed: Python has no part in most of them.

    Args:
        step: takes what was drawn for it, and the exponent.
        draws: of all steps.
        device: the GPU.
    """

    def __init__(self, step: Callable[[Tensor, int | None], None], draws: Tensor, device: str) -> None:
        self._step, self._draws, self._done = step, draws.to(device), 0
        # The number of the step is on the device, too: a recording has no numbers of its own.
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        self._aside = torch.cuda.Stream(device)
        self._graph: tuple[int | None, Any] | None = None

    def step(self, exponent: int | None) -> None:
        """The next one."""
        if self._done < _UNRECORDED:
            self._aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._aside):
                self._counted(exponent)
            torch.cuda.current_stream().wait_stream(self._aside)
        else:
            if self._graph is None or self._graph[0] != exponent:
                self._graph = exponent, self._recorded(exponent)
            self._graph[1].replay()
        self._done += 1

    def _recorded(self, exponent: int | None) -> Any:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._aside):
            self._counted(exponent)
        return graph

    def _counted(self, exponent: int | None) -> None:
        self._step(self._draws.index_select(0, self._at)[0], exponent)
        self._at += 1


class LossWatch:
    """Looks at the error of the rounded layer on rows that teach nothing; says when more steps are in vain.

    AdaRound's codes wander while its regulariser is weak, and often come back to less than they began with.
    So what counts is where an error is going: it is hopeless where at its pace it would not be the least seen
    by the last step, and two such looks in a row are the end.
    """

    def __init__(self, settings: Finetune, algorithm: str) -> None:
        self._patient, self._last = not settings.early_stop, settings.iterations
        self._period = max(1, settings.iterations // _LOOKS)
        self._from = settings.warm_start * settings.iterations if algorithm == "adaround" else 0.0
        self._seen: list[tuple[int, float]] = []
        self._hopeless = 0
        self.best = float("inf")

    def next(self, step: int) -> int:
        """The step to look after next."""
        return min((step // self._period + 1) * self._period, self._last)

    def see(self, step: int, error: float) -> bool:
        """Note an error; whether it is the best so far."""
        better = error < self.best
        self.best = min(self.best, error)
        self._seen.append((step, error))
        if len(self._seen) > _SPAN and self._seen[-1 - _SPAN][0] >= self._from:
            before, then = self._seen[-1 - _SPAN]
            end = error - (then - error) * (self._last - step) / (step - before)
            self._hopeless = 0 if end < self.best * (1 - _LEAST_GAIN) else self._hopeless + 1
        return better

    @property
    def stalled(self) -> bool:
        """Whether to stop."""
        return not self._patient and self._hopeless >= _PATIENCE


def as_doubles(values: Tensor) -> Doubles:
    """A tensor's content."""
    array: Doubles = values.detach().cpu().double().numpy()
    return array
