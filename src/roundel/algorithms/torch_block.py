"""A residual block in torch: its layers learn together, on the error of the block's output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from roundel.algorithms.finetune_blocks import Block, Step
from roundel.algorithms.finetune_constants import Constants, Tuned, Weights
from roundel.algorithms.finetune_rows import Seen, held_from, layer_seed
from roundel.algorithms.layers import Layer
from roundel.algorithms.torch_layer import Tensor, activate, fake_quantize, tensor
from roundel.algorithms.torch_learners import Learner, make_learner
from roundel.algorithms.torch_training import Change, Heard, Outcome, Watch, learning_rate, numbers, relative
from roundel.recipe import Finetune

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
    weights: tuple[Weights, ...]
    seen: Seen
    constants: Constants
    algorithm: str
    settings: Finetune
    device: str

    def run(self, heard: Heard | None = None) -> Outcome:
        """Tune the block and judge it on the samples that it did not learn from."""
        return _Tuner(self).run(heard)


class _Tuner:
    def __init__(self, task: BlockTask) -> None:
        self._task, self._device, self._settings = task, task.device, task.settings
        make = task.algorithm, task.settings, task.device
        self._learners: list[Learner] = [make_learner(make[0], w, *make[1:]) for w in task.weights]
        self._scales = [tensor(w.scale, task.device) for w in task.weights]
        self._held_from = held_from(len(task.seen.outputs))

    def run(self, heard: Heard | None) -> Outcome:
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
        return Outcome(tuple(changes), before, after, steps, power)

    def _train(self, heard: Heard) -> tuple[list[tuple[Tensor, Tensor]], int]:
        settings = self._settings
        generator = torch.Generator().manual_seed(layer_seed(settings.seed, self._task.block.name))
        looks = range(min(self._held_from, _LOOK_SAMPLES))
        watch = Watch(settings, self._task.algorithm)
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
                out = fake_quantize(out, stored)
            values[name] = out
        return out


def _plain(step: Step, inputs: list[Tensor]) -> Tensor:
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
