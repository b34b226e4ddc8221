"""One layer in torch: its product, what learns, and the training loop with its early end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from roundel.improve.constants import Constants, Format, Held, LayerWeights, Tuned
from roundel.improve.finetune_rows import Rows, layer_seed, solved_codes
from roundel.improve.layers import Activation, Unit
from roundel.recipe.settings import Finetune
from roundel.types import Doubles

Tensor = Any  # torch is optional, and mypy does not follow it
_CHUNK = 8_000_000  # elements of the inputs computed with at once
_LOOK_ROWS = 4096
_LOOK_ELEMENTS = 32_000_000
_REFITS = 3


class TorchLayer:
    """Computes outputs from rows of inputs and codes of weights.

    Args:
        weights: the layer's numbers.
        activation: fused behind it.
        device: where to compute.
    """

    def __init__(self, weights: LayerWeights, activation: Activation | None, device: str) -> None:
        self._step, self._activation = tensor(weights.scale * weights.input_scale, device), activation
        slope, (groups, outputs, _) = None if activation is None else activation.slope, weights.shape
        whole = None if slope is None else np.broadcast_to(slope, groups * outputs).reshape(groups, outputs)
        self._slopes = None if whole is None else tensor(whole, device)

    def outputs(self, x: Tensor, codes: Tensor, bias: Tensor) -> Tensor:
        """(n, groups, outputs per group)."""
        return self.activated(self.product(x, codes) + bias)

    def product(self, x: Tensor, codes: Tensor) -> Tensor:
        """Inputs times weights, without bias."""
        weight = codes * self._step
        if len(weight) == 1:
            return (x[:, 0] @ weight[0].T)[:, None]
        if weight.shape[1] == 1:  # depthwise: a batch of products would be all overhead
            return (x * weight[:, 0]).sum(-1, keepdim=True)
        return torch.einsum("ngk,gok->ngo", x, weight)

    def activated(self, z: Tensor) -> Tensor:
        """Behind the activation."""
        return z if self._activation is None else activate(z, self._activation, self._slopes)

    @property
    def couples_channels(self) -> bool:
        """Whether an output depends on other channels than its own."""
        return self._activation is not None and self._activation.op == "Softmax"


_ACTIVATIONS: dict[str, Callable[[Tensor, Activation], Tensor]] = {
    "Relu": lambda z, _: torch.relu(z),
    "Clip": lambda z, how: z if how.bounds == (None, None) else torch.clamp(z, *how.bounds),
    "LeakyRelu": lambda z, how: torch.nn.functional.leaky_relu(z, how.alpha),
    "Gelu": lambda z, how: torch.nn.functional.gelu(z, approximate="tanh" if how.tanh else "none"),
    "HardSigmoid": lambda z, how: torch.clamp(how.alpha * z + how.beta, 0, 1),
    "Softmax": lambda z, _: torch.softmax(z.flatten(1), 1).reshape(z.shape),
    "Sigmoid": lambda z, _: torch.sigmoid(z),
    "Tanh": lambda z, _: torch.tanh(z),
}


def activate(z: Tensor, activation: Activation, slopes: Tensor | None = None) -> Tensor:
    """An activation over (n, groups, channels of a group)."""
    if activation.op == "PRelu":
        return torch.where(z < 0, z * slopes, z)
    return _ACTIVATIONS[activation.op](z, activation)


def straight_round(x: Tensor) -> Tensor:
    """Round, with the gradient of not rounding."""
    return x + (torch.round(x) - x).detach()


def straight_held(x: Tensor, hold: Callable[[Any], Any]) -> Tensor:
    """What a type without codes holds, with the gradient of the values themselves."""
    real = x.detach()
    return x + (torch.from_numpy(hold(real.cpu().numpy())).to(x.device) - real)


def tensor(array: Any, device: str) -> Tensor:
    """A float32 tensor on a device."""
    return torch.from_numpy(np.array(array, np.float32, order="C")).to(device)


class LayerFeed:
    """Hands out a layer's rows as tensors on a device."""

    def __init__(self, rows: Rows, device: str) -> None:
        self.rows = rows
        self._inputs = torch.from_numpy(rows.inputs).to(device)
        self._targets = torch.from_numpy(rows.targets).to(device)

    def batch(self, generator: Any, size: int) -> tuple[Tensor, Tensor]:
        """All rows of a few random samples to learn from."""
        starts = self.rows.starts
        chosen = torch.randperm(self.rows.held_from, generator=generator)[:size].tolist()
        slices = [slice(starts[i], starts[i + 1]) for i in chosen]
        return _cut(self._inputs, slices), _cut(self._targets, slices)

    def look(self) -> list[tuple[Tensor, Tensor]]:
        """Evenly spread rows to learn from: enough to watch the error, few enough to do so often."""
        last = self.rows.first_held
        width = self.rows.inputs.shape[1] * self.rows.inputs.shape[2]
        step = -(-last // max(1, min(_LOOK_ROWS, _LOOK_ELEMENTS // width)))
        return list(self._chunks(slice(0, last, step)))

    def held(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows that judge."""
        return self._chunks(slice(self.rows.first_held, self.rows.starts[-1], 1))

    def _chunks(self, which: slice) -> Iterator[tuple[Tensor, Tensor]]:
        width = self.rows.inputs.shape[1] * self.rows.inputs.shape[2]
        most = max(1, _CHUNK // width) * which.step
        for start in range(which.start, which.stop, most):
            part = slice(start, min(start + most, which.stop), which.step)
            yield _cut(self._inputs, [part]), _cut(self._targets, [part])


def _cut(source: Tensor, slices: list[slice]) -> Tensor:
    parts = [source[s] for s in slices]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(torch.float32)


def reconstruction(got: Tensor, wanted: Tensor) -> Tensor:
    """Mean over places of the squared distance over channels."""
    return (got - wanted).square().sum((1, 2)).mean()


def layer_channel_errors(layer: TorchLayer, data: Any, codes: Tensor, bias: Tensor) -> Tensor:
    """Mean squared error of each channel, (groups, outputs per group)."""
    total, count = torch.zeros_like(bias, dtype=torch.float64), 0
    with torch.no_grad():
        for x, y in data:
            total += (layer.outputs(x, codes, bias) - y).square().sum(0, dtype=torch.float64)
            count += len(x)
    return total / max(count, 1)


def refit_bias(layer: TorchLayer, data: list[tuple[Tensor, Tensor]], codes: Tensor, bias: Tensor) -> Tensor:
    """The bias with the least squared error behind the activation (Gauss-Newton), never a worse one."""
    if layer.couples_channels:
        return bias
    with torch.no_grad():
        products = [layer.product(x, codes) for x, _ in data]
    best, least = bias, layer_channel_errors(layer, data, codes, bias)
    tried = bias
    for _ in range(_REFITS):
        slope_residual, slope_square, count = torch.zeros_like(bias), torch.zeros_like(bias), 0
        for product, (_, y) in zip(products, data, strict=True):
            z = (product + tried).requires_grad_(True)
            out = layer.activated(z)
            slope = torch.autograd.grad(out.sum(), z)[0]
            slope_residual += (slope * (out.detach() - y)).sum(0)
            slope_square += slope.square().sum(0)
            count += len(y)
        tried = tried - slope_residual / (slope_square + 1e-4 * count)
        errors = layer_channel_errors(layer, data, codes, tried)
        better = errors < least
        best, least = torch.where(better, tried, best), torch.where(better, errors, least)
    return best


_STRETCH, _SHIFT = 1.2, -0.1  # the rectified sigmoid reaches 0 and 1 at finite arguments
_MARGIN = 0.02  # a code that is not the nearest one starts just on its side of the middle


class AdaRound:
    """Learns for each weight which of its two neighbouring codes to take.

    Args:
        weights: the layer's numbers; rounding starts as their codes are.
        settings: steps and regulariser.
        device: where to compute.
    """

    def __init__(self, weights: LayerWeights, settings: Finetune, device: str) -> None:
        base, share = rounding_start(weights)
        self._base = tensor(base, device)
        self._alpha = tensor(inverse_rectified(share), device).requires_grad_(True)
        self._bias = tensor(weights.bias, device)
        self._settings = settings
        self._up = rectified(self._alpha)

    def parameters(self) -> list[Tensor]:
        """What the optimiser moves."""
        return [self._alpha]

    def soft_codes(self) -> Tensor:
        """Codes between two whole numbers."""
        self._up = rectified(self._alpha)
        return self._base + self._up

    def hard_codes(self) -> Tensor:
        """The codes as they would be written now."""
        with torch.no_grad():
            return self._base + (self._alpha >= 0)

    def bias(self) -> Tensor:
        """The fixed bias."""
        return self._bias

    def set_bias(self, bias: Tensor) -> None:
        """Another fixed bias."""
        self._bias = bias

    def penalty(self, step: int) -> Tensor:
        """What being between two codes costs, as of the last soft codes; nothing during the warm start."""
        exponent = beta(step, self._settings)
        if exponent is None:
            return torch.zeros((), device=self._alpha.device)
        return self._settings.reg_param * (1 - (2 * self._up - 1).abs().pow(exponent)).sum()


class AdaQuant:
    """Learns the weights, and the bias where asked, through straight-through rounding.

    Args:
        weights: the layer's numbers.
        settings: whether the bias takes part.
        device: where to compute.
    """

    def __init__(self, weights: LayerWeights, settings: Finetune, device: str) -> None:
        self._scale = tensor(weights.scale, device)
        self._low, self._high = tensor(weights.low, device), tensor(weights.high, device)
        self._hold = weights.hold
        near = np.abs(weights.real / weights.scale - weights.codes) <= 0.5
        start = weights.real if self._hold else np.where(near, weights.real, weights.codes * weights.scale)
        self._weight = tensor(start, device).requires_grad_(True)
        learns = settings.update_bias and weights.bias_params is not None
        self._format = weights.bias_params if learns else None
        self._bias = tensor(weights.bias, device).requires_grad_(learns)

    def parameters(self) -> list[Tensor]:
        """What the optimiser moves."""
        return [self._weight] if self._format is None else [self._weight, self._bias]

    def soft_codes(self) -> Tensor:
        """Whole codes, or what the type holds, with the gradient of real ones."""
        if self._hold is not None:
            return straight_held(self._weight / self._scale, self._hold)
        return torch.clamp(straight_round(self._weight / self._scale), self._low, self._high)

    def hard_codes(self) -> Tensor:
        """The codes as they would be written now."""
        with torch.no_grad():
            return self.soft_codes()

    def bias(self) -> Tensor:
        """The bias as its format holds it."""
        return self._bias if self._format is None else _stored(self._bias, self._format)

    def set_bias(self, bias: Tensor) -> None:
        """Start from another bias."""
        with torch.no_grad():
            self._bias.copy_(bias)

    def penalty(self, step: int) -> Tensor:
        """Nothing: rounding is part of the forward pass."""
        return torch.zeros((), device=self._weight.device)


def rounding_start(weights: LayerWeights) -> tuple[Doubles, Doubles]:
    """The lower of the two codes of each weight, and how far above it the weight starts (0 to 1).

    The share lies on the side of the middle that the present code is on, so that learning starts from
    the rounding that an earlier step chose.
    """
    ratio = weights.real / weights.scale
    codes = np.clip(weights.codes, weights.low, weights.high)
    floor = np.floor(ratio)
    base = np.where(codes < floor, codes, np.where(codes > floor + 1, codes - 1, floor))
    base = np.clip(base, weights.low, weights.high - 1)
    share = np.clip(ratio - base, 0, 1)
    up = codes > base
    return base, np.where(up, np.maximum(share, 0.5 + _MARGIN), np.minimum(share, 0.5 - _MARGIN))


def inverse_rectified(share: Doubles) -> Doubles:
    """The argument whose rectified sigmoid is the share."""
    return np.asarray(-np.log(_STRETCH / (share - _SHIFT) - 1))


def rectified(alpha: Tensor) -> Tensor:
    """A sigmoid stretched beyond 0 and 1 and cut there."""
    return torch.clamp(torch.sigmoid(alpha) * _STRETCH + _SHIFT, 0, 1)


def beta(step: int, settings: Finetune) -> float | None:
    """The regulariser's exponent: a cosine from the first to the last; None during the warm start."""
    warm = settings.warm_start * settings.iterations
    if step < warm:
        return None
    first, last = settings.beta_range
    way = (step - warm) / max(settings.iterations - warm, 1)
    return last + (first - last) * (1 + math.cos(math.pi * way)) / 2


def _stored(bias: Tensor, params: Format) -> Tensor:
    if isinstance(params, Held):
        return straight_held(bias.reshape(-1), params.hold).reshape(bias.shape)
    scale = tensor(np.broadcast_to(params.scale.reshape(-1), (bias.numel(),)), str(bias.device))
    codes = straight_round(bias / scale.reshape(bias.shape))
    return torch.clamp(codes, params.qtype.qmin + 1, params.qtype.qmax) * scale.reshape(bias.shape)


Learner = AdaRound | AdaQuant
LEARNERS: dict[str, type[Learner]] = {"adaround": AdaRound, "adaquant": AdaQuant}


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
