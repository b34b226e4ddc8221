"""What learns in a layer: the rounding of its weights (AdaRound), or the weights themselves (AdaQuant)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from roundel.improve.constants import Held, LayerWeights
from roundel.improve.torch_layer import Tensor, TorchLayer, reconstruction, tensor, within
from roundel.recipe.settings import Finetune
from roundel.types import Doubles, QParams

_STRETCH, _SHIFT = 1.2, -0.1  # the rectified sigmoid reaches 0 and 1 at finite arguments
_LOW, _HIGH = -_SHIFT / _STRETCH, (1 - _SHIFT) / _STRETCH  # sigmoids that give 0 and 1
_MARGIN = 0.02  # a code that is not the nearest one starts just on its side of the middle


class AdaRound:
    """Learns for each weight which of its two neighbouring codes to take.

    All steps run in the same memory: for a large layer, passes over its weights cost as much as its products.

    Args:
        weights: the layer's numbers; rounding starts as their codes are.
        settings: steps and regulariser.
        device: where to compute.
    """

    def __init__(self, weights: LayerWeights, settings: Finetune, device: str) -> None:
        base, share = rounding_start(weights)
        self._base = _spread(base, device)
        self._shifted = self._base + _SHIFT
        self._alpha = _spread(inverse_rectified(share), device)
        self._alpha.grad = torch.empty_like(self._alpha)
        self._share, self._room = torch.empty_like(self._alpha), torch.empty_like(self._alpha)
        self._bias = tensor(weights.bias, device)
        self._reg_param = settings.reg_param
        self.on_device = True  # all steps, from the first to the last

    def parameters(self) -> list[Tensor]:
        """What the optimiser moves."""
        return [self._alpha]

    def learn(self, layer: TorchLayer, x: Tensor, y: Tensor, exponent: int | None) -> None:
        """The gradient of the error of some rows, and of the regulariser.

        Args:
            layer: computes outputs.
            x, y: rows, and what they should give.
            exponent: of the regulariser, 1 - |2 u - 1| ** exponent for a code u above the lower one; an even
                number, or None for no regulariser.
        """
        with torch.no_grad():
            gradient = self._alpha.grad
            layer.slope(x, y, self.soft_codes(), self._bias, out=gradient)
            if exponent is not None:
                away = torch.sub(self._share, 0.5, out=self._room).mul_(2 * _STRETCH)
                gradient.sub_(odd_power(away, exponent - 1), alpha=2 * self._reg_param * exponent)
            torch.ops.aten.sigmoid_backward.grad_input(gradient, self._share, grad_input=gradient)
            within(gradient, self._share, _LOW, _HIGH).mul_(_STRETCH)

    def soft_codes(self) -> Tensor:
        """Codes between two whole numbers."""
        with torch.no_grad():
            torch.sigmoid(self._alpha, out=self._share).clamp_(_LOW, _HIGH)
            return torch.add(self._shifted, self._share, alpha=_STRETCH, out=self._room)

    def hard_codes(self) -> Tensor:
        """The codes as they would be written now."""
        return self._base + (self._alpha >= 0)

    def bias(self) -> Tensor:
        """The fixed bias."""
        return self._bias


def odd_power(x: Tensor, exponent: int) -> Tensor:
    """x to an odd power by squaring, in place: a real exponent would cost more than all else in a step."""
    square, found, left = x.square(), x, exponent // 2
    while left:
        if left % 2:
            found = found.mul_(square)
        left //= 2
        if left:
            square.mul_(square)
    return found


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

    def learn(self, layer: TorchLayer, x: Tensor, y: Tensor, exponent: int | None) -> None:
        """The gradient of the error of some rows; there is no regulariser."""
        for parameter in self.parameters():
            parameter.grad = None
        reconstruction(layer.outputs(x, self.soft_codes(), self.bias()), y).backward()

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


Learner = AdaRound | AdaQuant
LEARNERS: dict[str, type[Learner]] = {"adaround": AdaRound, "adaquant": AdaQuant}


def straight_round(x: Tensor) -> Tensor:
    """Round, with the gradient of not rounding."""
    return x + (torch.round(x) - x).detach()


def straight_held(x: Tensor, hold: Callable[[Any], Any]) -> Tensor:
    """What a type without codes holds, with the gradient of the values themselves."""
    real = x.detach()
    return x + (torch.from_numpy(hold(real.cpu().numpy())).to(x.device) - real)


def _spread(matrix: Doubles, device: str) -> Tensor:
    """A matrix of weights; of a depthwise layer with its channels side by side, as they lie in its rows."""
    if matrix.shape[1] == 1:
        return tensor(matrix.transpose(2, 1, 0), device).permute(2, 1, 0)
    return tensor(matrix, device)


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


def regulariser_exponent(step: int, settings: Finetune) -> int | None:
    """A cosine from the first to the last, at the nearest even number; None during the warm start."""
    warm = settings.warm_start * settings.iterations
    if step < warm:
        return None
    first, last = settings.beta_range
    way = (step - warm) / max(settings.iterations - warm, 1)
    return 2 * max(1, round((last + (first - last) * (1 + math.cos(math.pi * way)) / 2) / 2))
