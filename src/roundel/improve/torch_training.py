"""The training loop: batches, Adam, a look at the true error now and then, and an early end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from roundel.improve.finetune_constants import Constants, Format, Tuned, UnitWeights
from roundel.improve.finetune_rows import Rows, SeenRows, held_from, layer_seed, solved_codes
from roundel.improve.finetune_units import Block, BlockStep, Tunable, Unit
from roundel.improve.layers import Layer
from roundel.improve.torch_layer import (
    LayerFeed,
    Learner,
    Tensor,
    TorchLayer,
    activate,
    fake_quantize_tensor,
    layer_channel_errors,
    make_learner,
    reconstruction,
    refit_bias,
    tensor,
)
from roundel.recipe.settings import Finetune
from roundel.types import Doubles

Heard = Callable[[float, float], None]  # the share of the steps that is done, and the loss

RATES = {"adaround": 0.1, "adaquant": 1e-5}
_LOOKS = 10
_PATIENCE = 3
_LEAST_GAIN = 1e-3  # a loss that falls by less has stopped falling
_CLEAR_GAIN = 0.01  # solved codes can be made from all rows, learned ones cannot: these must win clearly


@dataclass(frozen=True, slots=True, eq=False)
class TrainingTask:
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
    weights: UnitWeights
    rows: Rows
    output: Format | None
    constants: Constants
    algorithm: str
    settings: Finetune
    device: str

    def run(self, heard: Heard | None = None) -> TrainingOutcome:
        """Tune the layer and judge it on the rows that it did not learn from."""
        return tune(self, heard)


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """New constants for one layer."""

    layer: Tunable
    tuned: Tuned


@dataclass(frozen=True, slots=True, eq=False)
class TrainingOutcome:
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


def tune(task: TrainingTask, heard: Heard | None = None) -> TrainingOutcome:
    """Tune one layer and judge it on the rows that it did not learn from."""
    bench, power = TrainingBench(task), task.rows.power()
    solved = solved_codes(task.weights, task.rows)
    now = bench.measured(bench.state_codes, bench.state_bias)
    first = bench.candidate(bench.state_codes if solved is None else tensor(solved.taught, task.device))
    trained = train(task, bench, first, relative(heard, power))
    learned = bench.candidate(trained.codes, trained.bias)
    before, best = now.error, learned
    if solved is not None:
        whole = bench.candidate(tensor(solved.whole, task.device))
        # The walk's codes have seen the rows that judge. What that is worth, codes solved with and
        # without them tell.
        before *= max(1.0, first.error / max(whole.error, 1e-30))
        if first.error * (1 - _CLEAR_GAIN) <= learned.error:
            best = replace(whole, error=first.error)
    change = Change(task.unit.layer, Tuned(numbers(best.codes), best.stored, best.params))
    return TrainingOutcome((change,), before, best.error, trained.steps, power)


def relative(heard: Heard | None, power: float) -> Heard:
    """The same listener, or a deaf one, for losses that are not yet relative to the signal."""

    def hear(share: float, loss: float) -> None:
        if heard is not None:
            heard(share, loss / max(power, 1e-30))

    return hear


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
        self.layer = TorchLayer(weights, task.unit.activation, task.output, task.device)
        self.feed = LayerFeed(
            task.rows, task.device, settings.drop_ratio, resident=settings.mem_opt_level < 2
        )
        self.look = self.feed.look()
        self.state_codes, self.state_bias = (
            tensor(weights.codes, task.device),
            tensor(weights.bias, task.device),
        )
        self._refits = weights.bias_params is not None and (
            task.algorithm == "adaround" or settings.update_bias
        )

    def candidate(self, codes: Tensor, bias: Tensor | None = None) -> Candidate:
        """The codes with their best bias, if biases may change."""
        bias = self.state_bias if bias is None else bias
        return self.measured(codes, refit_bias(self.layer, self.look, codes, bias) if self._refits else bias)

    def measured(self, codes: Tensor, bias: Tensor) -> Candidate:
        """The codes with this bias."""
        task = self._task
        stored, params = task.constants.rounded_bias(task.unit.layer, task.weights, numbers(bias))
        held = layer_channel_errors(self.layer, self.feed.held(), codes, tensor(stored, self._device))
        return Candidate(codes, bias, stored, params, float(held.sum()))

    def error(self, learner: Learner) -> float:
        """Reconstruction error of the rounded layer on rows to learn from."""
        codes, bias = learner.hard_codes(), learner.bias().detach()
        return float(layer_channel_errors(self.layer, self.look, codes, bias).sum())


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """The best codes and bias seen, and the steps taken."""

    codes: Tensor
    bias: Tensor
    steps: int


def train(task: TrainingTask, bench: TrainingBench, start: Candidate, heard: Heard) -> Trained:
    """Follow the gradient; of the looks taken on the way the best one counts."""
    settings = task.settings
    weights = replace(task.weights, codes=numbers(start.codes))
    learner: Learner = make_learner(task.algorithm, weights, settings, task.device)
    learner.set_bias(start.bias)
    generator = torch.Generator().manual_seed(layer_seed(settings.seed, task.unit.layer.name))
    watch = LossWatch(settings, task.algorithm)
    best = learner.hard_codes(), learner.bias().detach().clone()
    watch.see(0, bench.error(learner))
    rate = learning_rate(settings, task.algorithm, watch.best)
    optimiser = torch.optim.Adam(learner.parameters(), lr=rate, fused=True)
    step = 0
    for step in range(1, settings.iterations + 1):
        optimiser.zero_grad()
        codes, bias = learner.soft_codes(), learner.bias()
        loss = learner.penalty(step - 1)
        for _ in range(settings.num_batches):
            x, y = bench.feed.batch(generator, settings.batch_size)
            loss = loss + reconstruction(bench.layer.outputs(x, codes, bias), y)
        loss.backward()
        optimiser.step()
        if watch.due(step):
            error = bench.error(learner)
            heard(step / settings.iterations, error)
            if watch.see(step, error):
                best = learner.hard_codes(), learner.bias().detach().clone()
            if watch.stalled:
                break
    return Trained(*best, step)


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


def learning_rate(settings: Finetune, algorithm: str, first_loss: float) -> float:
    """The rate of a layer whose error is this before it learns."""
    rate = RATES[algorithm] if settings.learning_rate is None else settings.learning_rate
    adjust = settings.lr_adjust
    return adjust[1] if adjust is not None and first_loss > adjust[0] else rate


def numbers(values: Tensor) -> Doubles:
    """A tensor's content."""
    array: Doubles = values.detach().cpu().double().numpy()
    return array


_LOOK_SAMPLES = 16
_CONVOLUTIONS = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)
_TRANSPOSED = (
    torch.nn.functional.conv_transpose1d,
    torch.nn.functional.conv_transpose2d,
    torch.nn.functional.conv_transpose3d,
)


@dataclass(frozen=True, slots=True, eq=False)
class BlockTask:
    """A block with everything its tuning needs.

    Attributes:
        block: its nodes.
        weights: the numbers of its layers, in their order.
        seen: its input's codes and its float output.
        constants: formats, and how biases are rounded.
        algorithm, settings, device: as for a single layer.
    """

    block: Block
    weights: tuple[UnitWeights, ...]
    seen: SeenRows
    constants: Constants
    algorithm: str
    settings: Finetune
    device: str

    def run(self, heard: Heard | None = None) -> TrainingOutcome:
        """Tune the block and judge it on the samples that it did not learn from."""
        return _Tuner(self).run(heard)


class _Tuner:
    def __init__(self, task: BlockTask) -> None:
        self._task, self._device, self._settings = task, task.device, task.settings
        make = task.algorithm, task.settings, task.device
        self._learners: list[Learner] = [make_learner(make[0], w, *make[1:]) for w in task.weights]
        self._scales = [tensor(w.scale, task.device) for w in task.weights]
        self._held_from = held_from(len(task.seen.outputs))

    def run(self, heard: Heard | None) -> TrainingOutcome:
        """Learn, choose, judge."""
        task, power = self._task, _power(self._task.seen.outputs[self._held_from :])
        start = [(tensor(w.codes, self._device), tensor(w.bias, self._device)) for w in task.weights]
        held = range(self._held_from, len(task.seen.outputs))
        before = self._error(start, held)
        found, steps = self._train(relative(heard, power))
        changes, stored = [], []
        for unit, weights, (codes, bias) in zip(task.block.units, task.weights, found, strict=True):
            real, params = task.constants.rounded_bias(unit.layer, weights, numbers(bias))
            changes.append(Change(unit.layer, Tuned(numbers(codes), real, params)))
            stored.append((codes, tensor(real, self._device)))
        after = self._error(stored, held)
        return TrainingOutcome(tuple(changes), before, after, steps, power)

    def _train(self, heard: Heard) -> tuple[list[tuple[Tensor, Tensor]], int]:
        settings = self._settings
        generator = torch.Generator().manual_seed(layer_seed(settings.seed, self._task.block.name))
        looks = range(min(self._held_from, _LOOK_SAMPLES))
        watch = LossWatch(settings, self._task.algorithm)
        best = self._now()
        watch.see(0, self._error(best, looks))
        rate = learning_rate(settings, self._task.algorithm, watch.best)
        moving = [p for learner in self._learners for p in learner.parameters()]
        optimiser = torch.optim.Adam(moving, lr=rate, fused=True)
        step = 0
        for step in range(1, settings.iterations + 1):
            optimiser.zero_grad()
            content = [(item.soft_codes(), item.bias()) for item in self._learners]
            loss = sum(item.penalty(step - 1) for item in self._learners)
            for _ in range(settings.num_batches):
                loss = loss + self._batch_loss(generator, content)
            loss.backward()
            optimiser.step()
            if watch.due(step):
                error = self._error(self._now(), looks)
                heard(step / settings.iterations, error)
                if watch.see(step, error):
                    best = self._now()
                if watch.stalled:
                    break
        return best, step

    def _now(self) -> list[tuple[Tensor, Tensor]]:
        return [(item.hard_codes(), item.bias().detach().clone()) for item in self._learners]

    def _batch_loss(self, generator: Any, content: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        chosen = torch.randperm(self._held_from, generator=generator)[: self._settings.batch_size].tolist()
        losses = []
        for index in chosen:
            x = self._entry(index)
            if self._task.seen.plain is not None:
                keep = torch.rand(x.shape, generator=generator).to(self._device) < self._settings.drop_ratio
                x = torch.where(keep, x, tensor(self._task.seen.plain[index], self._device))
            losses.append(self._loss(self._forward(x, content), index))
        return torch.stack(losses).mean()

    def _error(self, content: Sequence[tuple[Tensor, Tensor]], samples: range) -> float:
        with torch.no_grad():
            losses = [self._loss(self._forward(self._entry(i), content), i) for i in samples]
        return float(sum(losses)) / max(len(samples), 1)

    def _entry(self, index: int) -> Tensor:
        params, codes = self._task.seen.params, self._task.seen.codes[index]
        if params is None:
            return tensor(codes, self._device)
        whole = codes.astype(np.float32) - np.float32(params.zero_point)
        return tensor(whole * params.scale, self._device)

    def _loss(self, got: Tensor, index: int) -> Tensor:
        wanted = tensor(self._task.seen.outputs[index], self._device)
        channels = 1 if wanted.ndim != 3 else -1
        return (got - wanted).square().sum(channels).mean()

    def _forward(self, x: Tensor, content: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """The block's output, with the quantizers inside it."""
        constants, settings = self._task.constants, self._settings
        values: dict[str, Tensor] = {self._task.block.entry: x}
        number = 0
        out = x
        for step in self._task.block.steps:
            name = str(step.node.outputs[0].name)
            inputs = [values[str(v.name)] for v in step.node.inputs if v is not None and v.name in values]
            if step.unit is not None:
                codes, bias = content[number]
                shape = self._task.constants.float(step.unit.layer.weight).shape
                out = linear(step.unit.layer, inputs[0], codes * self._scales[number], bias, shape)
                number += 1
            else:
                out = _plain(step, inputs)
            inner = name != self._task.block.output
            stored = constants.format_of(name) if inner or settings.output_qdq else None
            if stored is not None:
                out = fake_quantize_tensor(out, stored)
            values[name] = out
        return out


def _plain(step: BlockStep, inputs: list[Tensor]) -> Tensor:
    if step.activation is not None:
        return activate(inputs[0], step.activation)
    one, other = inputs if len(inputs) == 2 else inputs * 2
    return one + other if step.node.op_type == "Add" else one * other


def linear(layer: Any, x: Tensor, matrix: Tensor, bias: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A layer over whole tensors; its weights come as a matrix (groups, outputs, inputs)."""
    assert isinstance(layer, Layer)
    flat = bias.reshape(-1)
    if not layer.kernel:
        return x @ matrix[0].T + flat
    dims = len(layer.kernel)
    if layer.op == "Conv":
        pads = [p for pair in zip(layer.begin[::-1], layer.end[::-1], strict=True) for p in pair]
        padded = torch.nn.functional.pad(x, pads) if any(pads) else x
        convolve = _CONVOLUTIONS[dims - 1]
        weight = matrix.reshape(shape)
        return convolve(padded, weight, flat, layer.strides, 0, layer.dilations, layer.groups)
    split = matrix.reshape(layer.groups, shape[1], shape[0] // layer.groups, *layer.kernel)
    turned = split.transpose(1, 2).flip(tuple(range(3, 3 + dims))).reshape(shape)
    out = _TRANSPOSED[dims - 1](x, turned, flat, layer.strides, 0, 0, layer.groups, layer.dilations)
    return _cropped(out, layer)


def _cropped(out: Tensor, layer: Layer) -> Tensor:
    for axis, (begin, end) in enumerate(zip(layer.begin, layer.end, strict=True), 2):
        out = out.narrow(axis, begin, out.shape[axis] - begin - end)
    return out


def _power(outputs: Sequence[NDArray[Any]]) -> float:
    """Variance of the targets around their channels' means, summed over channels."""
    axis = 1 if outputs[0].ndim != 3 else -1
    rows = np.concatenate([np.moveaxis(out, axis, -1).reshape(-1, out.shape[axis]) for out in outputs])
    return float(rows.var(0, dtype=np.float64).sum())
