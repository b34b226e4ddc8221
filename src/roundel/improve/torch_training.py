"""One layer in torch: its product, what learns, and the training loop with its early end."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from roundel.improve.constants import Constants, Format, Held, LayerWeights, Tuned
from roundel.improve.finetune_rows import Rows, layer_seed, solved_codes
from roundel.improve.layers import Activation, Unit
from roundel.recipe.settings import Finetune
from roundel.types import Doubles, QParams

Tensor = Any  # torch is optional, and mypy does not follow it
_CHUNK = 8_000_000  # elements of the inputs computed with at once
_LOOK_ROWS = 4096
_LOOK_ELEMENTS = 32_000_000
_REFITS = 3
_HALVED = 64  # places of a sample of which every other one is enough for a step


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
    """Hands out a layer's rows as tensors on a device.

    A step learns from every other place of its samples: their neighbours say much the same.
    """

    def __init__(self, rows: Rows, device: str) -> None:
        self.rows = rows
        self._inputs = torch.from_numpy(rows.inputs).to(device)
        self._targets = torch.from_numpy(rows.targets).to(device)
        each = {stop - start for start, stop in itertools.pairwise(rows.starts)}
        self._stride = 2 if min(each) >= _HALVED else 1
        count = each.pop() if len(each) == 1 else 0
        self.even = count > 0 and count % self._stride == 0

    def draws(self, generator: Any, steps: int, size: int) -> Tensor:
        """For each step, the samples to learn from and the first place in each, (steps, 2, size)."""
        found = []
        for _ in range(steps):
            some = torch.randperm(self.rows.held_from, generator=generator)[:size]
            found.append(torch.stack([some, torch.randint(self._stride, some.shape, generator=generator)]))
        return torch.stack(found)

    def batch(self, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of one draw."""
        if self.even:
            some, first = drawn
            inputs, targets = (self._pieces(side)[some, :, first] for side in (self._inputs, self._targets))
            return inputs.flatten(0, 1).to(torch.float32), targets.flatten(0, 1)
        starts = self.rows.starts
        slices = [slice(starts[i] + at, starts[i + 1], self._stride) for i, at in drawn.T.tolist()]
        return _cut(self._inputs, slices), _cut(self._targets, slices)

    def _pieces(self, side: Tensor) -> Tensor:
        """(samples, places, stride, …)."""
        return side.view(len(self.rows.starts) - 1, -1, self._stride, *side.shape[1:])

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
        self._reg_param = settings.reg_param
        self._share = self._up = self._codes = self._base
        self.on_device = True  # all steps, from the first to the last

    def parameters(self) -> list[Tensor]:
        """What the optimiser moves."""
        return [self._alpha]

    def soft_codes(self) -> Tensor:
        """Codes between two whole numbers; their gradient goes further with `pass_back`."""
        with torch.no_grad():
            self._share = torch.sigmoid(self._alpha)
            self._up = rectified(self._share)
        self._codes = (self._base + self._up).requires_grad_(True)
        return self._codes

    def pass_back(self, exponent: Tensor | None) -> None:
        """From the codes' gradient to that of what learns; autograd would read large weights twice as often.

        Args:
            exponent: of the regulariser, 1 - |2 u - 1| ** exponent for a code u above the lower one.
        """
        with torch.no_grad():
            gradient = self._codes.grad
            if exponent is not None:
                away = torch.mul(self._up, 2).sub_(1)
                pull = away.abs().pow_(exponent - 1).copysign_(away)
                gradient.sub_(pull.mul_(2 * self._reg_param * exponent))
            slope = torch.addcmul(self._share, self._share, self._share, value=-1).mul_(_STRETCH)
            self._alpha.grad = gradient.mul_(slope).mul_((self._up > 0) & (self._up < 1))

    def hard_codes(self) -> Tensor:
        """The codes as they would be written now."""
        with torch.no_grad():
            return self._base + (self._alpha >= 0)

    def bias(self) -> Tensor:
        """The fixed bias."""
        return self._bias


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
        self.on_device = self._hold is None and not isinstance(self._format, Held)
        self._bias = tensor(weights.bias, device).requires_grad_(learns)
        if isinstance(self._format, QParams):
            step = np.broadcast_to(self._format.scale.reshape(-1), (weights.bias.size,))
            self._bias_step = tensor(step.reshape(weights.bias.shape), device)

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
        if self._format is None:
            return self._bias
        if not isinstance(self._format, QParams):
            return straight_held(self._bias.reshape(-1), self._format.hold).reshape(self._bias.shape)
        low, high = self._format.qtype.qmin + 1, self._format.qtype.qmax
        return torch.clamp(straight_round(self._bias / self._bias_step), low, high) * self._bias_step

    def pass_back(self, exponent: Tensor | None) -> None:
        """Nothing: rounding is part of the forward pass."""


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


def rectified(share: Tensor) -> Tensor:
    """A sigmoid's value stretched beyond 0 and 1 and cut there."""
    return torch.clamp(share * _STRETCH + _SHIFT, 0, 1)


def beta(step: int, settings: Finetune) -> float | None:
    """The regulariser's exponent: a cosine from the first to the last; None during the warm start."""
    warm = settings.warm_start * settings.iterations
    if step < warm:
        return None
    first, last = settings.beta_range
    way = (step - warm) / max(settings.iterations - warm, 1)
    return last + (first - last) * (1 + math.cos(math.pi * way)) / 2


Learner = AdaRound | AdaQuant
LEARNERS: dict[str, type[Learner]] = {"adaround": AdaRound, "adaquant": AdaQuant}


Heard = Callable[[float, float], None]  # the share of the steps that is done, and the relative loss

Trained = tuple[Tensor, Tensor, int]  # the best codes and bias seen, and the steps taken

RATES = {"adaround": 0.1, "adaquant": 1e-5}
_LOOKS = 10
_PATIENCE = 3
_LEAST_GAIN = 1e-3  # a loss that falls by less has stopped falling
_UNRECORDED = 3  # first steps on a GPU: they set up what a recording cannot
_STEP_ROWS = 128  # of one sample, more or less
_WORTH_HALVING = 20_000_000  # products in a step of a layer
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
    """Follow the gradient: codes and bias of the best look on the way, and the number of steps taken.

    The outputs of a large layer learn in two halves side by side: they do not depend on each other.
    """
    weights = replace(task.weights, codes=as_doubles(start.codes), bias=as_doubles(start.bias))
    task = replace(task, weights=weights)
    if not _in_halves(task):
        return follow(task, bench, heard)
    middle = weights.shape[1] // 2
    halves = [_part(task, slice(None, middle)), _part(task, slice(middle, None))]

    def half(number: int) -> tuple[Tensor, Tensor, int]:
        told = heard if number == 0 else lambda share, loss: None
        return follow(halves[number], TrainingBench(halves[number]), told)

    with ThreadPoolExecutor(len(halves)) as pool:
        codes, biases, steps = zip(*pool.map(half, range(len(halves))), strict=True)
    return torch.cat(codes, 1), torch.cat(biases, 1), max(steps)


def _in_halves(task: TrainingTask) -> bool:
    groups, outputs, size = task.weights.shape
    activation = task.unit.activation
    alone = activation is None or (activation.slope is None and activation.op != "Softmax")
    work = task.settings.batch_size * _STEP_ROWS * groups * outputs * size
    usual = task.algorithm == "adaround" and task.weights.hold is None and task.device == "cpu"
    return usual and alone and outputs > 1 and work >= _WORTH_HALVING


def _part(task: TrainingTask, cut: slice) -> TrainingTask:
    """Some of the outputs."""
    names = "real", "codes", "scale", "low", "high", "bias"
    whole = {name: getattr(task.weights, name) for name in names}
    some = {name: array[:, cut] if array.shape[1] > 1 else array for name, array in whole.items()}
    rows = replace(task.rows, targets=task.rows.targets[:, :, cut], linear=None)
    return replace(task, weights=replace(task.weights, **some), rows=rows)


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
        betas = [beta(step, settings) for step in range(settings.iterations)]
        self._warm = sum(exponent is None for exponent in betas) if task.algorithm == "adaround" else 0
        self._exponents = torch.tensor([exponent or 0.0 for exponent in betas])
        rate = RATES[task.algorithm] if settings.learning_rate is None else settings.learning_rate
        on_gpu = device != "cpu"
        self._optimiser = torch.optim.Adam(learner.parameters(), lr=rate, fused=True, capturable=on_gpu)
        self._records = on_gpu and bench.feed.even and learner.on_device
        self._graphs: dict[bool, Any] = {}
        if on_gpu:
            self._exponents = self._exponents.to(device)
        if self._records:
            self._draws, self._at = self._draws.to(device), torch.zeros(1, dtype=torch.int64, device=device)
            self._aside = torch.cuda.Stream(device)

    def go(self, last: int) -> None:
        """All steps up to this one."""
        for step in range(self.done, last):
            anneals = step >= self._warm
            if not self._records:
                self._step(self._draws[step], self._exponents[step], anneals)
            elif step < _UNRECORDED:
                with self._on_side():
                    self._counted_step(anneals)
            else:
                if anneals not in self._graphs:
                    self._graphs = {anneals: self._recorded(anneals)}
                self._graphs[anneals].replay()
        self.done = last

    @contextmanager
    def _on_side(self) -> Iterator[None]:
        """On another stream than usual: what is to be recorded must have run there before."""
        self._aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._aside):
            yield
        torch.cuda.current_stream().wait_stream(self._aside)

    def _recorded(self, anneals: bool) -> Any:
        graph = torch.cuda.CUDAGraph()
        self._optimiser.zero_grad()
        with torch.cuda.graph(graph, stream=self._aside):
            self._counted_step(anneals)
        return graph

    def _counted_step(self, anneals: bool) -> None:
        """The step whose number the device knows: a recording has no numbers of its own."""
        drawn, exponent = (
            self._draws.index_select(0, self._at)[0],
            self._exponents.index_select(0, self._at)[0],
        )
        self._step(drawn, exponent, anneals)
        self._at += 1

    def _step(self, drawn: Tensor, exponent: Tensor, anneals: bool) -> None:
        self._optimiser.zero_grad()
        codes, bias = self._learner.soft_codes(), self._learner.bias()
        x, y = self._bench.feed.batch(drawn)
        reconstruction(self._bench.layer.outputs(x, codes, bias), y).backward()
        self._learner.pass_back(exponent if anneals else None)
        self._optimiser.step()


class LossWatch:
    """Looks at the reconstruction error of the rounded layer, and says when it has stopped falling."""

    def __init__(self, settings: Finetune, algorithm: str) -> None:
        self._patient, self._last = not settings.early_stop, settings.iterations
        self._period = max(1, settings.iterations // _LOOKS)
        # While AdaRound has no regulariser its codes wander; the error of the rounded layer says little.
        self._from = settings.warm_start * settings.iterations if algorithm == "adaround" else 0.0
        self.best = float("inf")
        self._mark, self._misses = float("inf"), 0

    def next(self, step: int) -> int:
        """The step to look after next."""
        return min((step // self._period + 1) * self._period, self._last)

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
