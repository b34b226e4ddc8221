"""The training loop: batches, Adam, a look at the true error now and then, and an early end."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from roundel.algorithms.finetune_constants import Array, Constants, Tuned, Weights
from roundel.algorithms.finetune_rows import Rows, layer_seed
from roundel.algorithms.finetune_start import solved_codes
from roundel.algorithms.finetune_units import Tunable, Unit
from roundel.algorithms.torch_layer import (
    Feed,
    Tensor,
    TorchLayer,
    channel_errors,
    reconstruction,
    refit_bias,
    tensor,
)
from roundel.algorithms.torch_learners import Learner, make_learner
from roundel.recipe import Finetune
from roundel.types import QParams

RATES = {"adaround": 0.1, "adaquant": 1e-5}
_LOOKS = 10
_PATIENCE = 3
_LEAST_GAIN = 1e-3  # a loss that falls by less has stopped falling


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One layer with everything its tuning needs; independent of all others.

    Attributes:
        unit: the layer.
        weights: its numbers.
        rows: its data.
        output: format of its output where the loss includes it.
        constants: rounds biases.
        algorithm: 'adaround' or 'adaquant'.
        settings: of the recipe.
        device: for torch.
    """

    unit: Unit
    weights: Weights
    rows: Rows
    output: QParams | None
    constants: Constants
    algorithm: str
    settings: Finetune
    device: str

    def run(self) -> Outcome:
        """Tune the layer and judge it on the rows that it did not learn from."""
        return tune(self)


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """New constants for one layer."""

    layer: Tunable
    tuned: Tuned


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """A tuned layer or block.

    Attributes:
        changes: its constants.
        before, after: held-out mean squared error, summed over channels.
        iterations: steps taken.
        power: variance of the held-out targets, likewise.
    """

    changes: tuple[Change, ...]
    before: float
    after: float
    iterations: int
    power: float


def tune(task: Task) -> Outcome:
    """Tune one layer and judge it on the rows that it did not learn from."""
    weights, settings, device = task.weights, task.settings, task.device
    layer = TorchLayer(weights, task.unit.activation, task.output, device)
    feed = Feed(task.rows, device, settings.drop_ratio, resident=settings.mem_opt_level < 2)
    codes, bias = tensor(weights.codes, device), tensor(weights.bias, device)
    before = float(channel_errors(layer, feed.held(), codes, bias).sum())
    look = feed.look()
    refits = weights.bias_params is not None and (task.algorithm == "adaround" or settings.update_bias)
    codes, bias = _start(task, layer, look, refits=refits)
    learner: Learner = make_learner(task.algorithm, replace(weights, codes=numbers(codes)), settings, device)
    learner.set_bias(bias)
    trained = train(task, layer, feed, learner, look)
    final = refit_bias(layer, look, trained.codes, trained.bias) if refits else trained.bias
    stored, params = task.constants.rounded_bias(task.unit.layer, weights, numbers(final))
    after = float(channel_errors(layer, feed.held(), trained.codes, tensor(stored, device)).sum())
    change = Change(task.unit.layer, Tuned(numbers(trained.codes), stored, params))
    return Outcome((change,), before, after, trained.steps, task.rows.power())


def _start(
    task: Task, layer: TorchLayer, look: list[tuple[Tensor, Tensor]], *, refits: bool
) -> tuple[Tensor, Tensor]:
    """Codes and bias to learn from: the state's, or where they are better those solved anew."""
    solved = solved_codes(task.weights, task.rows)
    best: tuple[float, Tensor, Tensor] | None = None
    for start in (task.weights.codes, solved):
        if start is None:
            continue
        codes, bias = tensor(start, task.device), tensor(task.weights.bias, task.device)
        if refits:
            bias = refit_bias(layer, look, codes, bias)
        error = float(channel_errors(layer, look, codes, bias).sum())
        if best is None or error < best[0]:
            best = error, codes, bias
    assert best is not None
    return best[1], best[2]


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """The best codes and bias seen, and the steps taken."""

    codes: Tensor
    bias: Tensor
    steps: int


def train(
    task: Task, layer: TorchLayer, feed: Feed, learner: Learner, look: list[tuple[Tensor, Tensor]]
) -> Trained:
    """Follow the gradient; of the looks taken on the way the best one counts."""
    settings = task.settings
    generator = torch.Generator().manual_seed(layer_seed(settings.seed, task.unit.layer.name))

    def error() -> float:
        return float(channel_errors(layer, look, learner.hard_codes(), learner.bias().detach()).sum())

    watch = Watch(settings, task.algorithm)
    best = learner.hard_codes(), learner.bias().detach().clone()
    watch.see(0, error())
    rate = learning_rate(settings, task.algorithm, watch.best)
    optimiser = torch.optim.Adam(learner.parameters(), lr=rate, fused=True)
    period = max(1, settings.iterations // _LOOKS)
    step = 0
    for step in range(1, settings.iterations + 1):
        optimiser.zero_grad()
        penalty = learner.penalty(step - 1)
        if penalty is not None:
            penalty.backward()
        for _ in range(settings.num_batches):
            x, y = feed.batch(generator, settings.batch_size)
            reconstruction(layer.outputs(x, learner.soft_codes(), learner.bias()), y).backward()
        optimiser.step()
        if step % period == 0 or step == settings.iterations:
            if watch.see(step, error()):
                best = learner.hard_codes(), learner.bias().detach().clone()
            if watch.stalled:
                break
    return Trained(*best, step)


class Watch:
    """Looks at the reconstruction error of the rounded layer, and says when it has stopped falling."""

    def __init__(self, settings: Finetune, algorithm: str) -> None:
        self._patient = not settings.early_stop
        # While AdaRound has no regulariser its codes wander; the error of the rounded layer says little.
        self._from = settings.warm_start * settings.iterations if algorithm == "adaround" else 0.0
        self.best = float("inf")
        self._mark, self._misses = float("inf"), 0

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


def learning_rate(settings: Finetune, algorithm: str, first_loss: float) -> float:
    """The rate of a layer whose error is this before it learns."""
    rate = RATES[algorithm] if settings.learning_rate is None else settings.learning_rate
    adjust = settings.lr_adjust
    return adjust[1] if adjust is not None and first_loss > adjust[0] else rate


def numbers(values: Tensor) -> Array:
    """A tensor's content."""
    array: Array = values.detach().cpu().double().numpy()
    return array
