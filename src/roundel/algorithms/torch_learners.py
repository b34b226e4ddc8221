"""What is learned: whether each weight is rounded up or down (AdaRound), or the weight itself (AdaQuant)."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import torch

from roundel.algorithms.finetune_constants import Format, Held, Weights
from roundel.algorithms.torch_layer import Tensor, straight_held, straight_round, tensor
from roundel.recipe import Finetune
from roundel.types import Doubles

_STRETCH, _SHIFT = 1.2, -0.1  # the rectified sigmoid reaches 0 and 1 at finite arguments
_MARGIN = 0.02  # a code that is not the nearest one starts just on its side of the middle


class Learner(Protocol):
    """Codes and bias that follow gradients."""

    def parameters(self) -> list[Tensor]: ...
    def soft_codes(self) -> Tensor: ...
    def hard_codes(self) -> Tensor: ...
    def bias(self) -> Tensor: ...
    def set_bias(self, bias: Tensor) -> None: ...
    def penalty(self, step: int) -> Tensor: ...


class AdaRound:
    """Learns for each weight which of its two neighbouring codes to take.

    Args:
        weights: the layer's numbers; rounding starts as their codes are.
        settings: steps and regulariser.
        device: where to compute.
    """

    def __init__(self, weights: Weights, settings: Finetune, device: str) -> None:
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

    def __init__(self, weights: Weights, settings: Finetune, device: str) -> None:
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


def rounding_start(weights: Weights) -> tuple[Doubles, Doubles]:
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


def make_learner(algorithm: str, weights: Weights, settings: Finetune, device: str) -> Any:
    """The learner of an algorithm."""
    return (AdaRound if algorithm == "adaround" else AdaQuant)(weights, settings, device)
