"""A layer's constants as fine-tuning sees them, and as they go back into the state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.algorithms.finetune_units import Tunable, Unit
from roundel.calibrate.reach import Reach, layer_reach
from roundel.calibrate.state import QuantState
from roundel.model.graph import constant_array
from roundel.numerics.affine import code_limits, dequantize, quantize
from roundel.qdq.write import weight_codes
from roundel.recipe import Npu
from roundel.types import QParams, QType

Array = NDArray[np.float64]
_POWERS = sorted(range(-6, 7), key=abs)  # of equally good scales the one nearest to the old


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """A layer's numbers, (groups, outputs per group, inputs per output) or broadcasting against it.

    Attributes:
        real: float weights.
        codes: the codes so far, less their zero point.
        scale: of the weights.
        low, high: codes that are legal, less the zero point.
        input_scale: of the input codes; 1 where rows are real numbers.
        bias: (groups, outputs per group) as the quantized model has it; zeros where there is none.
        bias_params: the bias's format; None where it cannot change.
    """

    real: Array
    codes: Array
    scale: Array
    low: Array
    high: Array
    input_scale: float
    bias: Array
    bias_params: QParams | None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the weights as a matrix."""
        groups, outputs, inputs = self.codes.shape
        return groups, outputs, inputs


@dataclass(frozen=True, slots=True, eq=False)
class Tuned:
    """New codes (less the zero point) and bias of a layer, and the bias's format."""

    codes: Array
    bias: Array
    bias_params: QParams | None


class Constants:
    """Reads and replaces the constants of a state.

    Args:
        graph: of the prepared float model.
        state: calibrated, and maybe rounded.
        npu: limits that a bias's scale must keep.
    """

    def __init__(self, graph: ir.Graph, state: QuantState, npu: Npu) -> None:
        self.state, self._npu = state, npu
        self._initializers = graph.initializers
        self._reach = layer_reach(graph, state)

    def codes(self, name: str) -> NDArray[Any]:
        """The integer content of a constant."""
        return weight_codes(self.float(name), self.state.plan.tensors[name], self.state)

    def float(self, name: str) -> NDArray[Any]:
        """A constant's own content."""
        array = constant_array(self._initializers[name])
        assert array is not None
        return array

    def weights(self, unit: Unit) -> Weights:
        """The numbers of a layer."""
        layer, params = unit.layer, self.state.params[unit.layer.weight]
        content = self.state.values.get(layer.weight, self.float(layer.weight))
        low, high = code_limits(self.state.plan.tensors[layer.weight].integer)
        zero = _spread(layer, params.zero_point, params, content.shape)
        codes = layer.matrix(self.codes(layer.weight).astype(np.float64)) - zero
        bias, bias_params = self._bias(layer, (codes.shape[0], codes.shape[1]))
        return Weights(
            real=layer.matrix(content.astype(np.float64)),
            codes=codes,
            scale=_spread(layer, params.scale, params, content.shape),
            low=low - zero,
            high=high - zero,
            input_scale=1.0 if unit.normalizes else float(self.state.params[layer.data].scale),
            bias=bias,
            bias_params=bias_params,
        )

    def rounded_bias(self, layer: Tunable, weights: Weights, bias: Array) -> tuple[Array, QParams | None]:
        """The bias as its format can hold it, with the scale that suits it best."""
        if weights.bias_params is None or np.array_equal(bias, weights.bias):
            return weights.bias, weights.bias_params
        params = self._bias_scale(layer, weights.bias_params, bias)
        codes = quantize(bias.reshape(-1), params, narrow=True)
        return dequantize(codes, params).astype(np.float64).reshape(bias.shape), params

    def accept(self, layer: Tunable, tuned: Tuned) -> dict[str, tuple[NDArray[Any], QParams]]:
        """Take new constants over; returns the codes and formats that changed."""
        weight = self.state.params[layer.weight]
        shape = self.float(layer.weight).shape
        zero = _spread(layer, weight.zero_point, weight, shape)
        whole = layer.tensor(tuned.codes + zero, shape).astype(weight.qtype.dtype)
        changed = {layer.weight: (np.ascontiguousarray(whole), weight)}
        if layer.bias is not None and tuned.bias_params is not None:
            flat = quantize(tuned.bias.reshape(-1), tuned.bias_params, narrow=True)
            changed[layer.bias] = (flat.reshape(self.float(layer.bias).shape), tuned.bias_params)
        self.restore(changed)
        return changed

    def restore(self, changed: dict[str, tuple[NDArray[Any], QParams]]) -> None:
        """Put codes and formats into the state."""
        codes = {**self.state.codes, **{name: codes for name, (codes, _) in changed.items()}}
        params = {**self.state.params, **{name: params for name, (_, params) in changed.items()}}
        self.state = replace(self.state, codes=codes, params=params)

    def _bias(self, layer: Tunable, shape: tuple[int, int]) -> tuple[Array, QParams | None]:
        if layer.bias is None:
            return np.zeros(shape), None
        content, params = self.float(layer.bias).reshape(-1), self.state.params.get(layer.bias)
        if params is not None and layer.bias in self.state.plan.tensors:
            content = dequantize(self.codes(layer.bias).reshape(-1), params)
        if content.size != shape[0] * shape[1]:
            params = None  # one number for all channels: nothing to learn for each
        return np.broadcast_to(content.astype(np.float64), (shape[0] * shape[1],)).reshape(shape), params

    def _bias_scale(self, layer: Tunable, old: QParams, bias: Array) -> QParams:
        if old.qtype in (QType.INT32, QType.INT16) or old.scale.ndim or old.zero_point.any():
            return old  # tied to the input and the weight, whose scales stay
        reach: Reach | None = self._reach.get(layer.name) if self._npu.adjust_shift_bias else None
        weight = float(self.state.params[layer.weight].scale.reshape(-1)[0])
        best, least = old, np.inf
        for power in _POWERS:
            scale = float(old.scale) * 2.0**power
            if reach is not None and not reach.allows_bias(scale, weight):
                continue
            codes = np.clip(np.rint(bias / scale), old.qtype.qmin + 1, old.qtype.qmax)
            error = float(((codes * scale - bias) ** 2).sum())
            if error < least:
                best, least = replace(old, scale=np.asarray(scale, np.float32)), error
        return best


def _spread(layer: Tunable, numbers: NDArray[Any], params: QParams, shape: tuple[int, ...]) -> Array:
    """Scales or zero points so that they broadcast against the weights as a matrix."""
    if params.axis is None or numbers.ndim == 0:
        return np.asarray(numbers, np.float64).reshape(1, 1, 1)
    along = [1] * len(shape)
    along[params.axis % len(shape)] = -1
    full = layer.matrix(np.broadcast_to(numbers.astype(np.float64).reshape(along), shape))
    return np.ascontiguousarray(full[:, :, :1])
