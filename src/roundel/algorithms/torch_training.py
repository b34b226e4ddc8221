"""The training loop: batches, Adam, a look at the true error now and then, and an early end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from roundel.algorithms.finetune_constants import Array, Constants, Tuned, Weights
from roundel.algorithms.finetune_rows import Rows, layer_seed
from roundel.algorithms.finetune_units import Unit
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


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """A tuned layer: its constants, held-out mean squared error before and after, and steps taken."""

    tuned: Tuned
    before: float
    after: float
    iterations: int


def tune(task: Task) -> Outcome:
    """Tune one layer and judge it on the rows that it did not learn from."""
    weights, settings, device = task.weights, task.settings, task.device
    layer = TorchLayer(weights, task.unit.activation, task.output, device)
    feed = Feed(task.rows, device, settings.drop_ratio, resident=settings.mem_opt_level < 2)
    learner: Learner = make_learner(task.algorithm, weights, settings, device)
    codes, bias = tensor(weights.codes, device), tensor(weights.bias, device)
    before = float(channel_errors(layer, feed.held(), codes, bias).sum())
    look = feed.look()
    refits = weights.bias_params is not None and (task.algorithm == "adaround" or settings.update_bias)
    if refits:
        learner.set_bias(refit_bias(layer, look, codes, bias))
    trained = train(task, layer, feed, learner, look)
    final = refit_bias(layer, look, trained.codes, trained.bias) if refits else trained.bias
    stored, params = task.constants.rounded_bias(task.unit.layer, weights, _numbers(final))
    after = float(channel_errors(layer, feed.held(), trained.codes, tensor(stored, device)).sum())
    return Outcome(Tuned(_numbers(trained.codes), stored, params), before, after, trained.steps)


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
    optimiser = torch.optim.Adam(learner.parameters(), lr=_rate(task, watch.best), fused=True)
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


def _rate(task: Task, first_loss: float) -> float:
    given = task.settings.learning_rate
    rate = RATES[task.algorithm] if given is None else given
    adjust = task.settings.lr_adjust
    return adjust[1] if adjust is not None and first_loss > adjust[0] else rate


def _numbers(values: Tensor) -> Array:
    array: Array = values.detach().cpu().double().numpy()
    return array


Tuner = Callable[[Task], Outcome]


def single_threaded() -> Callable[[], None]:
    """Let each tuner use one core, since several run side by side; returns what undoes it."""
    threads: Any = torch.get_num_threads()
    torch.set_num_threads(1)
    return lambda: torch.set_num_threads(threads)
