"""A layer's constants: as a step sees them, as they go back into the state, and in the model as written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.calibrate.positions import layer_limits
from roundel.improve.layers import Unit
from roundel.improve.probe import simulated
from roundel.model.graph import constant_array, values_by_name
from roundel.model.layers import Layer
from roundel.numerics.affine import code_limits, dequantize, quantize
from roundel.numerics.floats import FloatFormat
from roundel.qdq.functions.blocks import BlockFormat, block_format
from roundel.qdq.nodes import BEFORE, CODES
from roundel.qdq.write import weight_codes
from roundel.recipe.settings import Recipe
from roundel.state import State
from roundel.types import BlockScheme, Doubles, FloatScheme, QParams, QType


@dataclass(frozen=True, slots=True)
class BlockGrid:
    """A block format along an axis: what QParams is to integers."""

    form: BlockFormat
    axis: int
    scale: ClassVar[float] = 1.0

    def hold(self, array: NDArray[Any]) -> NDArray[np.float32]:
        """Each value as it is read back."""
        return self.form.apply(np.asarray(array, np.float32), self.axis)


Held = FloatFormat | BlockGrid
Format = QParams | Held
Changed = dict[str, tuple[NDArray[Any], QParams | None]]  # codes with their format, or real numbers
_POWERS = sorted(range(-6, 7), key=abs)  # of equally good scales the one nearest to the old


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """A layer's numbers, (groups, outputs per group, inputs per output) or broadcasting against it.

    Attributes:
        real: float weights.
        codes: the codes so far, less their zero point.
        scale: of the weights.
        low, high: codes that are legal, less the zero point.
        input_scale: of the input codes; 1 where rows are real numbers.
        bias: (groups, outputs per group) as the quantized model has it; zeros where there is none.
        bias_params: the bias's format; None where it cannot change.
        hold: of weights without codes, what is stored for real numbers, both in units of the scale; `codes`
            are then real, too.
    """

    real: Doubles
    codes: Doubles
    scale: Doubles
    low: Doubles
    high: Doubles
    input_scale: float
    bias: Doubles
    bias_params: Format | None
    hold: Callable[[NDArray[Any]], NDArray[Any]] | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the weights as a matrix."""
        groups, outputs, inputs = self.codes.shape
        return groups, outputs, inputs


@dataclass(frozen=True, slots=True, eq=False)
class Tuned:
    """New codes (less the zero point) and bias of a layer, and the bias's format."""

    codes: Doubles
    bias: Doubles
    bias_params: Format | None


class Constants:
    """Reads and replaces the constants of a state.

    Args:
        graph: of the prepared float model.
        state: calibrated, and maybe rounded.
        recipe: limits that a bias's scale must keep, and how blocks are cut.
    """

    def __init__(self, graph: ir.Graph, state: State, recipe: Recipe) -> None:
        self.state, self._blocks = state, recipe.blocks
        self._initializers = graph.initializers
        self.limits = layer_limits(graph, state, recipe.npu)

    def codes(self, name: str) -> NDArray[Any]:
        """The integer content of a constant."""
        return weight_codes(self.float(name), self.state.plan.tensors[name], self.state)

    def float(self, name: str) -> NDArray[Any]:
        """A constant's own content."""
        array = constant_array(self._initializers[name])
        assert array is not None
        return array

    def format_of(self, name: str) -> Format | None:
        """How a tensor is stored; None where it stays float32."""
        params, tensor = self.state.params.get(name), self.state.plan.tensors.get(name)
        if params is not None or tensor is None:
            return params
        if isinstance(tensor.scheme, BlockScheme):
            return BlockGrid(block_format(tensor.scheme.block, self._blocks), tensor.scheme.axis)
        assert isinstance(tensor.scheme, FloatScheme)
        return FloatFormat(tensor.scheme.ftype, float(self.state.float_scales.get(name, 1.0)))

    def stored(self, name: str) -> tuple[NDArray[Any], QParams | None]:
        """A constant as the state has it: codes with their format, or real numbers."""
        params = self.state.params.get(name)
        return (self._real(name), None) if params is None else (self.codes(name), params)

    def _real(self, name: str) -> NDArray[Any]:
        return self.state.values.get(name, self.float(name))

    def weights(self, unit: Unit) -> LayerWeights:
        """The numbers of a layer."""
        layer, stored = unit.layer, self.format_of(unit.layer.weight)
        content, given = self._real(layer.weight), self.state.params.get(layer.data)
        real = layer.matrix(content.astype(np.float64))
        bias, bias_params = self._bias(layer, (real.shape[0], real.shape[1]))
        plain = LayerWeights(
            real=real,
            codes=real,
            scale=np.ones((1, 1, 1)),
            low=np.full((1, 1, 1), -np.inf),
            high=np.full((1, 1, 1), np.inf),
            input_scale=1.0 if layer.normalizes or given is None else float(given.scale),
            bias=bias,
            bias_params=bias_params,
        )
        if isinstance(stored, Held):
            return _held(layer, plain, stored, content.shape)
        params = self.state.params[layer.weight]
        low, high = code_limits(self.state.plan.tensors[layer.weight].integer)
        zero = _spread(layer, params.zero_point, params, content.shape)
        return replace(
            plain,
            codes=layer.matrix(self.codes(layer.weight).astype(np.float64)) - zero,
            scale=_spread(layer, params.scale, params, content.shape),
            low=low - zero,
            high=high - zero,
        )

    def rounded_bias(
        self, layer: Layer, weights: LayerWeights, bias: Doubles
    ) -> tuple[Doubles, Format | None]:
        """The bias as its format can hold it, with the scale that suits it best."""
        if weights.bias_params is None or np.array_equal(bias, weights.bias):
            return weights.bias, weights.bias_params
        if isinstance(weights.bias_params, Held):
            held = weights.bias_params.hold(bias.reshape(-1))
            return held.astype(np.float64).reshape(bias.shape), weights.bias_params
        params = weights.bias_params
        if not _derived(params):
            params = self.best_bias_scale(layer.name, bias, params, self.state.params[layer.weight])
        codes = quantize(bias.reshape(-1), params, narrow=True)
        return dequantize(codes, params).astype(np.float64).reshape(bias.shape), params

    def changes(self, layer: Layer, tuned: Tuned) -> Changed:
        """The layer's new constants as they are stored."""
        shape, stored = self.float(layer.weight).shape, self.format_of(layer.weight)
        changed: Changed = {}
        if isinstance(stored, Held):
            real = layer.tensor(tuned.codes * stored.scale, shape).astype(np.float32)
            changed[layer.weight] = (np.ascontiguousarray(real), None)
        elif stored is not None:
            zero = _spread(layer, stored.zero_point, stored, shape)
            whole = layer.tensor(tuned.codes + zero, shape).astype(stored.qtype.dtype)
            changed[layer.weight] = (np.ascontiguousarray(whole), stored)
        if layer.bias is not None and isinstance(tuned.bias_params, Held):
            bias = tuned.bias.reshape(self.float(layer.bias).shape)
            changed[layer.bias] = (bias.astype(np.float32), None)
        elif layer.bias is not None and isinstance(tuned.bias_params, QParams):
            flat = quantize(tuned.bias.reshape(-1), tuned.bias_params, narrow=True)
            changed[layer.bias] = (flat.reshape(self.float(layer.bias).shape), tuned.bias_params)
        return changed

    def take(self, changed: Changed) -> None:
        """Put codes and formats, or real numbers, into the state."""
        codes, params, values = dict(self.state.codes), dict(self.state.params), dict(self.state.values)
        for name, (content, kind) in changed.items():
            if kind is None:
                values[name] = content
            else:
                codes[name], params[name] = content, kind
        self.state = replace(self.state, codes=codes, params=params, values=values)

    def _bias(self, layer: Layer, shape: tuple[int, int]) -> tuple[Doubles, Format | None]:
        if layer.bias is None:
            return np.zeros(shape), None
        content, params = self._real(layer.bias).reshape(-1), self.format_of(layer.bias)
        if isinstance(params, Held):
            content = params.hold(content)
        elif params is not None and layer.bias in self.state.plan.tensors:
            content = dequantize(self.codes(layer.bias).reshape(-1), params)
        if content.size != shape[0] * shape[1]:
            params = None  # one number for all channels: nothing to learn for each
        return np.broadcast_to(content.astype(np.float64), (shape[0] * shape[1],)).reshape(shape), params

    def best_bias_scale(self, layer: str, bias: Doubles, old: QParams, weight: QParams) -> QParams:
        """The power of two next to the old scale with the least error within the NPU's shift limits."""
        limits = self.limits.get(layer)
        best, least = old, np.inf
        for power in _POWERS:
            scale = float(old.scale) * 2.0**power
            if limits is not None and not limits.allows_bias(scale, float(weight.scale.reshape(-1)[0])):
                continue
            codes = np.clip(np.rint(bias / scale), old.qtype.qmin + 1, old.qtype.qmax)
            error = float(((codes * scale - bias) ** 2).sum())
            if error < least:
                best, least = replace(old, scale=np.asarray(scale, np.float32)), error
        return best


def _held(layer: Layer, plain: LayerWeights, stored: Held, shape: tuple[int, ...]) -> LayerWeights:
    """The numbers of a layer whose weights have no codes."""

    def hold(matrix: NDArray[Any]) -> NDArray[Any]:
        whole = layer.tensor(matrix * stored.scale, shape)
        return layer.matrix(stored.hold(whole) / np.float32(stored.scale))

    codes = hold(plain.real / stored.scale).astype(np.float64)
    return replace(plain, codes=codes, scale=np.full((1, 1, 1), stored.scale), hold=hold)


def _derived(bias: QParams) -> bool:
    """Whether a bias is tied to the input and the weight, whose scales stay."""
    return bias.qtype in (QType.INT32, QType.INT16) or bool(bias.scale.ndim or bias.zero_point.any())


def _spread(layer: Layer, numbers: NDArray[Any], params: QParams, shape: tuple[int, ...]) -> Doubles:
    """Scales or zero points so that they broadcast against the weights as a matrix."""
    if params.axis is None or numbers.ndim == 0:
        return np.asarray(numbers, np.float64).reshape(1, 1, 1)
    along = [1] * len(shape)
    along[params.axis % len(shape)] = -1
    full = layer.matrix(np.broadcast_to(numbers.astype(np.float64).reshape(along), shape))
    return np.ascontiguousarray(full[:, :, :1])


class Written:
    """A quantized model whose constants change.

    Args:
        model: the prepared float model.
        written: the same with its Q/DQ nodes.
    """

    def __init__(self, model: ir.Model, written: ir.Model) -> None:
        self.model = written
        self._values = values_by_name(self.model.graph)
        self._nodes = {str(node.name): node for node in self.model.graph}
        self._given = values_by_name(model.graph)

    @staticmethod
    def of(model: ir.Model, state: State, recipe: Recipe) -> Written:
        """As it will be written, with the constants found so far."""
        return Written(model, simulated(model, state, _replaceable(recipe)))

    def take(self, state: State, names: Iterable[str]) -> None:
        """Store these constants as another state does."""
        for name in names:
            array = constant_array(self._given[name])
            assert array is not None
            codes = weight_codes(array, state.plan.tensors[name], state)
            self.replace({name: (codes, state.params[name])})

    def replace(self, changed: Changed) -> None:
        """Put new codes and scales, or new real numbers, into it."""
        for name, (codes, params) in changed.items():
            if params is None:
                self._values[name].const_value = ir.Tensor(codes, name=name)
                continue
            stored = self._values[f"{name}{CODES}"]
            node = stored.consumers()[0]
            stored.const_value = ir.Tensor(codes, name=stored.name)
            scale = node.inputs[1]
            assert scale is not None
            scale.const_value = ir.Tensor(params.scale, name=scale.name)

    def seen_as(self, tensor: str) -> str:
        """The name of the real numbers that readers of a tensor get."""
        for use in self._given[tensor].uses():
            reader = self._nodes.get(str(use.node.name))
            value = reader.inputs[use.idx] if reader is not None else None
            if value is not None:
                return str(value.name)
        raise KeyError(tensor)

    def output_of(self, node: str) -> str:
        """The name of what a node makes, whatever stores it behind."""
        return str(self._nodes[node].outputs[0].name)

    def codes_of(self, tensor: str) -> str:
        """The name of a tensor's integer codes."""
        for name in (tensor, f"{tensor}{BEFORE}"):
            value = self._values.get(name)
            for node in value.consumers() if value is not None else ():
                if node.op_type == "QuantizeLinear":
                    return str(node.outputs[0].name)
        raise KeyError(tensor)


def _replaceable(recipe: Recipe) -> Recipe:
    """Short floats as float32 constants before casts: the same numbers, which can be replaced."""
    plain: dict[str, Any] = {"output": {"half_weights": False, "strip_functions": False}}
    if {recipe.activations.type, recipe.weights.type} & {"bfloat16", "float16"}:
        form = "plain" if recipe.floats.form == "plain" else "cast"  # no bodies to inline, piece by piece
        plain["floats"] = {"form": form}
    return recipe.merged(plain)
