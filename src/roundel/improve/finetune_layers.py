"""What fine-tuning works on: a layer with constant weights, and the activation fused behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.improve.layers import Layer, read_layer, runs_quantized
from roundel.model.graph import (
    attribute_float,
    attribute_int,
    clip_bounds,
    constant_array,
    only_reader,
    rank,
)
from roundel.plan.types import QuantPlan, Role, TensorPlan
from roundel.recipe.settings import Finetune
from roundel.state import State
from roundel.types import Scheme

NORMS = ("InstanceNormalization", "LayerNormalization")
_FUSED = ("Relu", "PRelu", "LeakyRelu", "Gelu", "Tanh", "Clip", "Sigmoid", "HardSigmoid", "Softmax")


@dataclass(frozen=True, slots=True)
class NormLayer:
    """A normalization: behind the statistics it is one weight and one bias for each channel.

    Attributes:
        name, op, data, weight, bias, output: as in `layers.Layer`.
        epsilon: added to the variance.
        axis: first normalized axis of a LayerNormalization.
    """

    name: str
    op: str
    data: str
    weight: str
    bias: str | None
    output: str
    epsilon: float
    axis: int = -1

    def matrix(self, weight: NDArray[Any]) -> NDArray[Any]:
        """(channels, 1, 1)."""
        return weight.reshape(-1, 1, 1)

    def tensor(self, matrix: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """The inverse of `matrix`."""
        return matrix.reshape(shape)

    def places(self, shape: tuple[int, ...], most: int, rng: np.random.Generator) -> NDArray[np.intp]:
        """Up to `most` flat positions of an output of this shape."""
        if self.op == "InstanceNormalization":
            count = shape[0] * int(np.prod(shape[2:]))
        else:
            count = int(np.prod(shape[: self.axis]))
        return np.arange(count) if count <= most else np.sort(rng.choice(count, most, replace=False))

    def targets(self, output: NDArray[Any], places: NDArray[np.intp]) -> NDArray[np.float32]:
        """(n, channels, 1) at the given places."""
        if self.op == "InstanceNormalization":
            batch, where = np.divmod(places, int(np.prod(output.shape[2:])))
            rows = output.reshape(*output.shape[:2], -1)[batch, :, where]
        else:
            rows = output.reshape(int(np.prod(output.shape[: self.axis])), -1)[places]
        return rows.reshape(len(places), -1, 1).astype(np.float32, copy=False)

    def inputs(self, data: NDArray[Any], places: NDArray[np.intp], spatial: tuple[int, ...]) -> NDArray[Any]:
        """(n, channels, 1): the normalized input, before weight and bias."""
        first = 2 if self.op == "InstanceNormalization" else self.axis % data.ndim
        axes = tuple(range(first, data.ndim))
        mean = data.mean(axes, keepdims=True)
        spread = np.sqrt(data.var(axes, keepdims=True) + self.epsilon)
        return self.targets((data - mean) / spread, places)


Tunable = Layer | NormLayer  # as a matrix: rows of inputs in, rows of outputs out


@dataclass(frozen=True, slots=True, eq=False)
class Activation:
    """A fused activation as the quantized model computes it.

    Attributes:
        op: its operator.
        alpha: slope of LeakyRelu and HardSigmoid.
        beta: offset of HardSigmoid.
        bounds: of Clip; None leaves a side open.
        slope: of PRelu, one number or one for each channel.
        tanh: whether Gelu is the tanh approximation.
    """

    op: str
    alpha: float = 0.0
    beta: float = 0.0
    bounds: tuple[float | None, float | None] = (None, None)
    slope: NDArray[np.float32] | None = None
    tanh: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """A layer to tune.

    Attributes:
        layer: its matrix view.
        activation: fused behind it, or None.
        output: the float tensor that its loss looks at: behind the activation where there is one.
    """

    layer: Tunable
    activation: Activation | None
    output: str

    @property
    def name(self) -> str:
        """The layer's."""
        return self.layer.name

    @property
    def normalizes(self) -> bool:
        """Whether its rows are normalized values instead of codes."""
        return self.layer.op in NORMS


def find_units(
    graph: ir.Graph, quantized: ir.Graph, state: State, settings: Finetune, algorithm: str
) -> tuple[Unit, ...]:
    """The layers that the settings ask for, in graph order.

    Args:
        graph: of the prepared float model.
        quantized: of the written model, which may compute an activation in another way.
        state: calibrated.
        settings: name the operators.
        algorithm: 'adaround' leaves normalizations out: they have no rounding worth learning.
    """
    layers: dict[str, Tunable] = {}
    for node in graph:
        layer = read_layer(node) if runs_quantized(node, state.plan) else None
        if layer is not None and _stored(layer, state.plan, algorithm):
            layers[layer.name] = layer
    nodes = {str(node.name): node for node in graph}
    simulated = {str(node.name): node for node in quantized}
    if algorithm == "adaquant":
        layers |= {norm.name: norm for norm in _norms(graph, state)}
    found = []
    for name, node in nodes.items():
        tuned = layers.get(name)
        if tuned is None or tuned.op not in settings.target_op_types:
            continue
        behind = _behind(node, state.plan)
        activation = None
        if behind is not None:
            activation = _activation(_computed(behind, simulated), node, state)
        output = str(behind.outputs[0].name) if behind is not None and activation else tuned.output
        found.append(Unit(tuned, activation, output))
    return tuple(found)


def _stored(layer: Layer, plan: QuantPlan, algorithm: str) -> bool:
    """Tuning at fixed scales copes with any input, zero point and bias."""
    data, weight = plan.tensors.get(layer.data), plan.tensors.get(layer.weight)
    if data is None or data.role is not Role.ACTIVATION:
        return False
    return weight is not None and learnable(weight, algorithm)


def learnable(tensor: TensorPlan, algorithm: str) -> bool:
    """Whether an algorithm can learn a constant of this type: AdaRound chooses between two codes."""
    return algorithm == "adaquant" or isinstance(tensor.scheme, Scheme)


def _norms(graph: ir.Graph, state: State) -> list[NormLayer]:
    found = []
    for node in graph:
        if node.op_type not in NORMS or not runs_quantized(node, state.plan):
            continue
        data, weight = node.inputs[0], node.inputs[1]
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        if data is None or weight is None or data.name not in state.plan.tensors:
            continue
        planned = state.plan.tensors.get(str(weight.name))
        if planned is None or not learnable(planned, "adaquant"):
            continue
        shared = len(weight.uses()) != 1 or (bias is not None and len(bias.uses()) != 1)
        computed = constant_array(weight) is None or (bias is not None and constant_array(bias) is None)
        dims = rank(data)
        if shared or computed or dims is None:
            continue
        axis = attribute_int(node, "axis", -1)
        names = (str(data.name), str(weight.name), None if bias is None else str(bias.name))
        common = (str(node.name), node.op_type, *names, str(node.outputs[0].name))
        found.append(NormLayer(*common, attribute_float(node, "epsilon", 1e-5), axis % dims))
    return found


def _behind(node: ir.Node, plan: QuantPlan) -> ir.Node | None:
    """The activation that reads the layer's output and nothing else does, with no Q/DQ pair between."""
    if node.outputs[0].name in plan.tensors:
        return None
    reader = only_reader(node.outputs[0])
    return reader if reader is not None and reader.op_type in _FUSED else None


def _computed(node: ir.Node, simulated: Mapping[str, ir.Node]) -> ir.Node:
    """The node as the NPU computes it, where its own parameters say so.

    A Clip that became a Relu is not: there the quantizer behind it keeps the bound.
    """
    other = simulated.get(str(node.name), node)
    return other if other.op_type in ("LeakyRelu", "HardSigmoid", "Clip") else node


def _activation(node: ir.Node, layer: ir.Node, state: State) -> Activation | None:
    """The activation of a node, or None where rows of channels are not enough to compute it."""
    op = node.op_type
    if op == "LeakyRelu":
        return Activation(op, alpha=attribute_float(node, "alpha", 0.01))
    if op == "HardSigmoid":
        alpha, beta = attribute_float(node, "alpha", 0.2), attribute_float(node, "beta", 0.5)
        return Activation(op, alpha=alpha, beta=beta)
    if op == "Gelu":
        attribute = node.attributes.get("approximate")
        return Activation(op, tanh=attribute is not None and attribute.as_string() == "tanh")
    if op == "Clip":
        bounds = clip_bounds(node)
        return None if bounds is None else Activation(op, bounds=bounds)
    if op == "PRelu":
        return _prelu(node, layer, state)
    if op == "Softmax":
        return Activation(op) if _over_channels(node, layer) else None
    return Activation(op) if op in _FUSED else None


def _prelu(node: ir.Node, layer: ir.Node, state: State) -> Activation | None:
    slope = constant_array(node.inputs[1])
    if slope is None or node.inputs[1] is None:
        return None
    axis = _channel_axis(layer)
    if slope.size != 1 and (axis is None or slope.ndim < -axis or slope.size != slope.shape[axis]):
        return None
    content = state.values.get(str(node.inputs[1].name), slope)
    return Activation("PRelu", slope=np.asarray(content, np.float32).reshape(-1))


def _over_channels(node: ir.Node, layer: ir.Node) -> bool:
    axis, dims = _channel_axis(layer), rank(layer.outputs[0])
    wanted = attribute_int(node, "axis", -1)
    if axis is None:
        return False
    return wanted == axis if dims is None else wanted % dims == axis % dims


def _channel_axis(layer: ir.Node) -> int | None:
    """Where the layer's output channels are, counted from the end; None where there are several axes."""
    if layer.op_type in ("Gemm", "MatMul"):
        return -1
    if layer.op_type == "LayerNormalization":
        return None
    dims = rank(layer.outputs[0])
    return None if dims is None else 1 - dims


def channel_slopes(activation: Activation | None, shape: tuple[int, int]) -> NDArray[np.float32] | None:
    """PRelu's slopes shaped (groups, outputs per group); None for any other activation."""
    if activation is None or activation.slope is None:
        return None
    return np.broadcast_to(activation.slope, (shape[0] * shape[1],)).reshape(shape)
