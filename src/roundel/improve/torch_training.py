"""The training loop: batches, Adam, a look at the true error now and then, and an early end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from roundel.improve.constants import Constants, Format, LayerWeights, Tuned
from roundel.improve.finetune_rows import Rows, layer_seed, solved_codes
from roundel.improve.layers import Unit
from roundel.improve.torch_layer import (
    LEARNERS,
    LayerFeed,
    Learner,
    Tensor,
    TorchLayer,
    layer_channel_errors,
    reconstruction,
    refit_bias,
    tensor,
)
from roundel.recipe.settings import Finetune
from roundel.types import Doubles

Heard = Callable[[float, float], None]  # the share of the steps that is done, and the relative loss

Trained = tuple[Tensor, Tensor, int]  # the best codes and bias seen, and the steps taken

RATES = {"adaround": 0.1, "adaquant": 1e-5}
_LOOKS = 10
_PATIENCE = 3
_LEAST_GAIN = 1e-3  # a loss that falls by less has stopped falling
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
    codes, bias, steps = train(task, bench, first, lambda share, loss: heard(share, loss / max(power, 1e-30)))
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
    """Measures a layer with any codes."""

    def __init__(self, task: TrainingTask) -> None:
        self._task, self._device = task, task.device
        settings, weights = task.settings, task.weights
        self.layer = TorchLayer(weights, task.unit.activation, task.device)
        self.feed = LayerFeed(task.rows, task.device)
        self.look = self.feed.look()
        self.state_codes, self.state_bias = (
            tensor(weights.codes, self._device),
            tensor(weights.bias, self._device),
        )
        changes = task.algorithm == "adaround" or settings.update_bias
        self._refits = changes and weights.bias_params is not None

    def candidate(self, codes: Tensor, bias: Tensor | None = None) -> Candidate:
        """The codes with their best bias, if biases may change."""
        bias = self.state_bias if bias is None else bias
        return self.measured(codes, refit_bias(self.layer, self.look, codes, bias) if self._refits else bias)

    def measured(self, codes: Tensor, bias: Tensor) -> Candidate:
        """The codes with this bias."""
        task = self._task
        stored, params = task.constants.rounded_bias(task.unit.layer, task.weights, as_doubles(bias))
        held = layer_channel_errors(self.layer, self.feed.held(), codes, tensor(stored, self._device))
        return Candidate(codes, bias, stored, params, float(held.sum()))

    def error(self, learner: Learner) -> float:
        """Reconstruction error of the rounded layer on rows to learn from."""
        codes, bias = learner.hard_codes(), learner.bias().detach()
        return float(layer_channel_errors(self.layer, self.look, codes, bias).sum())


def train(
    task: TrainingTask, bench: TrainingBench, start: Candidate, heard: Heard
) -> tuple[Tensor, Tensor, int]:
    """Follow the gradient: codes and bias of the best look on the way, and the number of steps taken."""
    settings = task.settings
    weights = replace(task.weights, codes=as_doubles(start.codes))
    learner = LEARNERS[task.algorithm](weights, settings, task.device)
    learner.set_bias(start.bias)
    generator = torch.Generator().manual_seed(layer_seed(settings.seed, task.unit.layer.name))
    watch = LossWatch(settings, task.algorithm)
    best = learner.hard_codes(), learner.bias().detach().clone()
    watch.see(0, bench.error(learner))
    rate = RATES[task.algorithm] if settings.learning_rate is None else settings.learning_rate
    optimiser = torch.optim.Adam(learner.parameters(), lr=rate, fused=True)
    step = 0
    for step in range(1, settings.iterations + 1):
        optimiser.zero_grad()
        codes, bias = learner.soft_codes(), learner.bias()
        x, y = bench.feed.batch(generator, settings.batch_size)
        loss = learner.penalty(step - 1) + reconstruction(bench.layer.outputs(x, codes, bias), y)
        loss.backward()
        optimiser.step()
        if watch.due(step):
            error = bench.error(learner)
            heard(step / settings.iterations, error)
            if watch.see(step, error):
                best = learner.hard_codes(), learner.bias().detach().clone()
            if watch.stalled:
                break
    return *best, step


class LossWatch:
    """Looks at the reconstruction error of the rounded layer, and says when it has stopped falling."""

    def __init__(self, settings: Finetune, algorithm: str) -> None:
        self._patient, self._last = not settings.early_stop, settings.iterations
        self._period = max(1, settings.iterations // _LOOKS)
        # While AdaRound has no regulariser its codes wander; the error of the rounded layer says little.
        self._from = settings.warm_start * settings.iterations if algorithm == "adaround" else 0.0
        self.best = float("inf")
        self._mark, self._misses = float("inf"), 0

    def due(self, step: int) -> bool:
        """Whether to look after this step."""
        return step % self._period == 0 or step == self._last

    def see(self, step: int, error: float) -> bool:
        """Note an error; whether it is the best so far."""
        if step > self._from or step == 0:
            falls = error < self._mark * (1 - _LEAST_GAIN)
            self._mark = min(self._mark, error)
            self._misses = 0 if falls else self._misses + 1
        better = error < self.best
        self.best = min(self.best, error)
        return better

    @property
    def stalled(self) -> bool:
        """Whether to stop."""
        return not self._patient and self._misses >= _PATIENCE


def as_doubles(values: Tensor) -> Doubles:
    """A tensor's content."""
    array: Doubles = values.detach().cpu().double().numpy()
    return array
