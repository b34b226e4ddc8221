"""One layer in torch: its product, its error and that error's slope, and its rows as batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from roundel.improve.constants import LayerWeights
from roundel.improve.finetune_rows import Rows
from roundel.improve.layers import Activation

Tensor = Any  # torch is optional, and mypy does not follow it
_CHUNK = 8_000_000  # elements of the inputs computed with at once
_WIDE = 8192  # elements of a row; one of twice as many counts as two
_LEAST_ROWS = 64
_HALVED = 64  # places of a sample of which every other one is enough for a step


class TorchLayer:
    """Computes outputs from rows of inputs and codes of weights.

    Args:
        weights: the layer's numbers.
        activation: fused behind it.
        device: where to compute.
    """

    def __init__(self, weights: LayerWeights, activation: Activation | None, device: str) -> None:
        scale = np.asarray(weights.scale * weights.input_scale)
        # One step for each output, so that outputs take it, which are fewer than the weights.
        self._step, self._activation = tensor(scale[:, :, 0], device), activation
        slope, (groups, outputs, _) = None if activation is None else activation.slope, weights.shape
        whole = None if slope is None else np.broadcast_to(slope, groups * outputs).reshape(groups, outputs)
        self._slopes = None if whole is None else tensor(whole, device)
        self._bounds = None if activation is None else _bounds(activation)

    def outputs(self, x: Tensor, codes: Tensor, bias: Tensor) -> Tensor:
        """(n, groups, outputs per group)."""
        return self.activated(self.product(x, codes).add_(bias))

    def product(self, x: Tensor, codes: Tensor) -> Tensor:
        """Inputs times weights, without bias."""
        if len(codes) == 1:
            found = (x[:, 0] @ codes[0].T)[:, None]
        elif codes.shape[1] == 1:  # depthwise: a batch of products would be all overhead
            found = (x * codes[:, 0]).sum(-1, keepdim=True)
        else:
            found = torch.einsum("ngk,gok->ngo", x, codes)
        return found.mul_(self._step)

    def slope(self, x: Tensor, y: Tensor, codes: Tensor, bias: Tensor, out: Tensor) -> Tensor:
        """How `reconstruction` changes with each code: what autograd would find, in fewer passes.

        Args:
            x, y: rows, and what they should give.
            codes: of the weights.
            bias: of the outputs.
            out: where to write it; may be `codes`.
        """
        pull = self._pull(self.product(x, codes).add_(bias), y).mul_(self._step * (2 / len(x)))
        if len(out) == 1:
            torch.mm(pull[:, 0].T, x[:, 0], out=out[0])
        elif out.shape[1] == 1:
            torch.sum(x * pull, 0, out=out[:, 0])
        else:
            out.copy_(torch.einsum("ngo,ngk->gok", pull, x))
        return out

    def _pull(self, z: Tensor, y: Tensor) -> Tensor:
        """How half of the squared distance to the target changes with each output before the activation."""
        if self._activation is None:
            return z.sub_(y)
        if self._bounds is not None:
            return within(z.clamp(*self._bounds).sub_(y), z, *self._bounds)
        with torch.enable_grad():
            z.requires_grad_(True)
            distance = (self.activated(z) - y).square().sum() / 2
            return torch.autograd.grad(distance, z)[0]

    def bias_slopes(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sums over rows for each output: of squared errors, of errors times slopes, of squared slopes."""
        if self._activation is None:
            error = z.sub_(y)
            return error.square().sum(0), error.sum(0), torch.full_like(error[0], len(error))
        if self._bounds is not None:
            error = z.clamp(*self._bounds).sub_(y)
            square, inside = error.square().sum(0), within(torch.ones_like(z), z, *self._bounds)
            return square, error.mul_(inside).sum(0), inside.sum(0)
        with torch.enable_grad():
            out = self.activated(z.requires_grad_(True))
            slope = torch.autograd.grad(out.sum(), z)[0]
        error = out.detach() - y
        return error.square().sum(0), (slope * error).sum(0), slope.square().sum(0)

    def activated(self, z: Tensor) -> Tensor:
        """Behind the activation."""
        return z if self._activation is None else activate(z, self._activation, self._slopes)

    @property
    def couples_channels(self) -> bool:
        """Whether an output depends on other channels than its own."""
        return self._activation is not None and self._activation.op == "Softmax"


def within(gradient: Tensor, x: Tensor, low: float, high: float) -> Tensor:
    """The gradient, in place, where x lies between the bounds, and 0 elsewhere."""
    # One pass; a mask would take four.
    return torch.ops.aten.hardtanh_backward.grad_input(gradient, x, low, high, grad_input=gradient)


def _bounds(activation: Activation) -> tuple[float, float] | None:
    """Of an activation that only cuts off."""
    if activation.op == "Relu":
        return 0.0, math.inf
    low, high = activation.bounds
    if activation.op != "Clip":
        return None
    return -math.inf if low is None else low, math.inf if high is None else high


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


def tensor(array: Any, device: str) -> Tensor:
    """A float32 tensor on a device."""
    return torch.from_numpy(np.array(array, np.float32, order="C")).to(device)


@dataclass(frozen=True, slots=True)
class Part:
    """Some of a layer's groups, or of the outputs of each."""

    groups: slice = field(default_factory=lambda: slice(None))
    outputs: slice = field(default_factory=lambda: slice(None))


class LayerFeed:
    """Hands out a layer's rows as tensors on a device.

    A step learns from every other place of its samples: their neighbours say much the same.

    Args:
        rows: of the whole layer.
        device: where they are wanted.
        part: of the layer.
    """

    def __init__(self, rows: Rows, device: str, part: Part | None = None) -> None:
        self.rows, self._device, self._part = rows, device, part or Part()
        # Seen as they lie in memory: whole rows are picked without turning them around.
        self._turned = rows.inputs.shape[1] > 1 == rows.targets.shape[2]
        inputs = rows.inputs.transpose(0, 2, 1) if self._turned else rows.inputs
        self._inputs = torch.from_numpy(inputs).to(device)
        self._targets = torch.from_numpy(rows.targets).to(device)
        each = {stop - start for start, stop in pairwise(rows.starts)}
        self._stride = 2 if min(each) >= _HALVED else 1
        count = each.pop() if len(each) == 1 else 0
        self.even = count > 0 and count % self._stride == 0
        self._offsets = torch.arange(0, count, self._stride, device=device)

    def draws(self, generator: Any, steps: int, size: int) -> Tensor:
        """For each step and each of its samples, the first row to learn from, (steps, size)."""
        chance = torch.rand(steps, self.rows.held_from, generator=generator)
        some = chance.topk(min(size, self.rows.held_from)).indices
        first = torch.randint(self._stride, some.shape, generator=generator)
        return torch.tensor(self.rows.starts)[some] + first

    def batch(self, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of one step's draw."""
        if self.even:
            return self._picked((drawn.to(self._device)[:, None] + self._offsets).flatten())
        starts = np.asarray(self.rows.starts)
        ends = starts[np.searchsorted(starts, drawn.numpy(), side="right")].tolist()
        each = [torch.arange(at, end, self._stride) for at, end in zip(drawn.tolist(), ends, strict=True)]
        return self._picked(torch.cat(each).to(self._device))

    def teaching(self, most: int) -> list[tuple[Tensor, Tensor]]:
        """Rows to learn from, evenly spread."""
        return list(self._chunks(np.arange(self.rows.first_held), most))

    def watching(self, most: int) -> list[tuple[Tensor, Tensor]]:
        """Rows that say when to stop, evenly spread."""
        return list(self._chunks(self.rows.watching, most))

    def judging(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows that judge."""
        return self._chunks(self.rows.judging, None)

    def _chunks(self, which: NDArray[np.intp], most: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        width = self.rows.inputs.shape[1] * self.rows.inputs.shape[2]
        if most is not None:
            which = which[:: -(-len(which) // max(_LEAST_ROWS, most * _WIDE // max(width, _WIDE)))]
        size = max(1, _CHUNK // width)
        for start in range(0, len(which), size):
            yield self._picked(torch.from_numpy(which[start : start + size]).to(self._device))

    def _picked(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        inputs, targets = self._inputs.index_select(0, numbers), self._targets.index_select(0, numbers)
        x = inputs.transpose(1, 2) if self._turned else inputs
        groups = self._part.groups
        return x[:, groups].to(torch.float32), targets[:, groups, self._part.outputs]


def reconstruction(got: Tensor, wanted: Tensor) -> Tensor:
    """Mean over places of the squared distance over channels."""
    return (got - wanted).square().sum((1, 2)).mean()


def layer_channel_errors(
    layer: TorchLayer, data: Iterable[tuple[Tensor, Tensor]], codes: Tensor, bias: Tensor
) -> Tensor:
    """Mean squared error of each channel, (groups, outputs per group)."""
    total, count = torch.zeros_like(bias, dtype=torch.float64), 0
    with torch.no_grad():
        for x, y in data:
            total += (layer.outputs(x, codes, bias) - y).square_().sum(0)
            count += len(y)
    return total / max(count, 1)


def refit_bias(
    layer: TorchLayer, data: list[tuple[Tensor, Tensor]], codes: Tensor, bias: Tensor, rounds: int = 3
) -> Tensor:
    """The bias with the least squared error behind the activation (Gauss-Newton), never a worse one."""
    if layer.couples_channels:
        return bias
    with torch.no_grad():
        products = [(layer.product(x, codes), y) for x, y in data]
        rows = sum(len(y) for _, y in products)
        best, least, tried = bias, torch.full_like(bias, math.inf), bias
        for _ in range(rounds + 1):
            sums = [layer.bias_slopes(product + tried, y) for product, y in products]
            square, slope_residual, slope_square = (sum(each) for each in zip(*sums, strict=True))
            better = square < least
            best, least = torch.where(better, tried, best), torch.where(better, square, least)
            tried = tried - slope_residual / (slope_square + 1e-4 * rows)
    return best
