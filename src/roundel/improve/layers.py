"""The layers of a plan: those that are rounded, and those that are tuned, with the activation behind each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.model.graph import (
    attribute_float,
    attribute_int,
    attribute_string,
    clip_bounds,
    constant_array,
    is_op,
    only_reader,
    rank,
)
from roundel.model.layers import Layer, read_own
from roundel.plan.types import QuantPlan, Role
from roundel.recipe.settings import Finetune
from roundel.state import State
from roundel.targets.operators import LAYERS
from roundel.types import PerChannel, Scheme

_FUSED = ("Relu", "PRelu", "LeakyRelu", "Gelu", "Tanh", "Clip", "Sigmoid", "HardSigmoid", "Softmax")


def quantized_layers(graph: ir.Graph, plan: QuantPlan) -> tuple[Layer, ...]:
    """The layers whose input, weight and bias are all in integers, in graph order."""
    read = (read_own(node) for node in graph if is_op(node, *LAYERS) and runs_quantized(node, plan))
    return tuple(layer for layer in read if layer is not None and _in_integers(layer, plan))


def runs_quantized(node: ir.Node, plan: QuantPlan) -> bool:
    """Whether the plan quantizes the node."""
    verdict = plan.nodes.get(str(node.name))
    return verdict is not None and verdict.quantized


def _in_integers(layer: Layer, plan: QuantPlan) -> bool:
    names = [name for name in (layer.data, layer.weight, layer.bias) if name is not None]
    if not all(map(plan.in_integers, names)):
        return False
    stored = plan.tensors[layer.weight].integer
    return stored.symmetric or not isinstance(stored.granularity, PerChannel)


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

    layer: Layer
    activation: Activation | None
    output: str


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
    simulated = {str(node.name): node for node in quantized}
    found = []
    for node in graph:
        wanted = node.op_type in settings.target_op_types and runs_quantized(node, state.plan)
        layer = read_own(node) if wanted else None
        if layer is None or not _learnable(layer, state.plan, algorithm):
            continue
        behind = _behind(node, state.plan)
        activation = None if behind is None else _activation(_computed(behind, simulated), node, state)
        output = layer.output if behind is None or activation is None else str(behind.outputs[0].name)
        found.append(Unit(layer, activation, output))
    return tuple(found)


def _learnable(layer: Layer, plan: QuantPlan, algorithm: str) -> bool:
    """Tuning copes with any input, zero point and bias; AdaRound needs codes to choose from."""
    data, weight = plan.tensors.get(layer.data), plan.tensors.get(layer.weight)
    if data is None or weight is None or (data.role is not Role.ACTIVATION and not layer.normalizes):
        return False
    return algorithm == "adaquant" or (isinstance(weight.scheme, Scheme) and not layer.normalizes)


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
    bounds = clip_bounds(node) if op == "Clip" else (None, None)
    slope = _slope(node, layer, state) if op == "PRelu" else None
    alone = slope is not None if op == "PRelu" else op != "Softmax" or _over_channels(node, layer)
    if bounds is None or not alone:
        return None
    return Activation(
        op,
        alpha=attribute_float(node, "alpha", 0.2 if op == "HardSigmoid" else 0.01),
        beta=attribute_float(node, "beta", 0.5),
        bounds=bounds,
        slope=slope,
        tanh=attribute_string(node, "approximate", "none") == "tanh",
    )


def _slope(node: ir.Node, layer: ir.Node, state: State) -> NDArray[np.float32] | None:
    """PRelu's slopes as they are stored, one or one for each channel."""
    slope = constant_array(node.inputs[1])
    if slope is None or node.inputs[1] is None:
        return None
    axis = _channel_axis(layer)
    if slope.size != 1 and (axis is None or slope.ndim < -axis or slope.size != slope.shape[axis]):
        return None
    return np.asarray(state.values.get(str(node.inputs[1].name), slope), np.float32).reshape(-1)


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
