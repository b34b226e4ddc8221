"""What fine-tuning works on: a layer with constant weights, and the activation fused behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.calibrate.statistics import QuantState
from roundel.errors import RecipeError
from roundel.improve.layers import quantized_layers
from roundel.model.graph import (
    attribute_float,
    attribute_int,
    clip_bounds,
    constant_array,
    is_constant,
    only_reader,
    rank,
)
from roundel.plan.types import QuantPlan, Role, TensorPlan
from roundel.recipe.settings import Finetune
from roundel.types import QType, Scheme

NORMS = ("InstanceNormalization", "LayerNormalization")
_FUSED = ("Relu", "PRelu", "LeakyRelu", "Gelu", "Tanh", "Clip", "Sigmoid", "HardSigmoid", "Softmax")


class Tunable(Protocol):
    """A layer seen as a matrix: rows of inputs in, rows of outputs out."""

    @property
    def name(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def data(self) -> str: ...
    @property
    def weight(self) -> str: ...
    @property
    def bias(self) -> str | None: ...
    @property
    def output(self) -> str: ...
    def matrix(self, weight: NDArray[Any]) -> NDArray[Any]: ...
    def tensor(self, matrix: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]: ...
    def places(self, shape: tuple[int, ...], most: int, rng: np.random.Generator) -> NDArray[np.intp]: ...
    def targets(self, output: NDArray[Any], places: NDArray[np.intp]) -> NDArray[np.float32]: ...
    def inputs(
        self, data: NDArray[Any], places: NDArray[np.intp], spatial: tuple[int, ...]
    ) -> NDArray[Any]: ...


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
    graph: ir.Graph, quantized: ir.Graph, state: QuantState, settings: Finetune, algorithm: str
) -> tuple[Unit, ...]:
    """The layers that the settings ask for, in graph order.

    Args:
        graph: of the prepared float model.
        quantized: of the written model, which may compute an activation in another way.
        state: calibrated.
        settings: name the operators.
        algorithm: 'adaround' leaves normalizations out: they have no rounding worth learning.
    """
    layers: dict[str, Tunable] = {
        layer.name: layer for layer in quantized_layers(graph, _lenient(graph, state.plan, algorithm))
    }
    nodes = {str(node.name): node for node in graph}
    simulated = {str(node.name): node for node in quantized}
    if algorithm == "adaquant":
        layers |= {norm.name: norm for norm in _norms(graph, state)}
    found = []
    for name, node in nodes.items():
        layer = layers.get(name)
        if layer is None or layer.op not in settings.target_op_types:
            continue
        behind = _behind(node, state.plan)
        activation = None
        if behind is not None:
            activation = read_activation(_computed(behind, simulated), node, state)
        output = str(behind.outputs[0].name) if behind is not None and activation else layer.output
        found.append(Unit(layer, activation, output))
    return tuple(found)


def _lenient(graph: ir.Graph, plan: QuantPlan, algorithm: str) -> QuantPlan:
    """The plan as `quantized_layers` wants it: tuning at fixed scales copes with any zero point and bias.

    It takes any input, and AdaQuant also weights without codes.
    """
    tensors = {
        name: replace(tensor, scheme=Scheme(QType.INT8))
        for name, tensor in plan.tensors.items()
        if tensor.role is Role.ACTIVATION or learnable(tensor, algorithm)
    }
    for node in graph:
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        weight = node.inputs[1] if bias is not None else None
        if bias is not None and weight is not None and constant_array(bias) is not None:
            known = tensors.get(str(weight.name))
            if known is not None:
                tensors.setdefault(str(bias.name), known)  # stands for a bias that stays float
    return replace(plan, tensors=tensors)


def learnable(tensor: TensorPlan, algorithm: str) -> bool:
    """Whether an algorithm can learn a constant of this type: AdaRound chooses between two codes."""
    return algorithm == "adaquant" or isinstance(tensor.scheme, Scheme)


def _norms(graph: ir.Graph, state: QuantState) -> list[NormLayer]:
    found = []
    for node in graph:
        verdict = state.plan.nodes.get(str(node.name))
        if node.op_type not in NORMS or verdict is None or not verdict.quantized:
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


def read_activation(node: ir.Node, layer: ir.Node, state: QuantState) -> Activation | None:
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


def _prelu(node: ir.Node, layer: ir.Node, state: QuantState) -> Activation | None:
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


_ACTIVATIONS = ("Relu", "LeakyRelu", "Gelu", "Tanh", "Clip", "Sigmoid", "HardSigmoid")
_JOINS = ("Add", "Mul")


@dataclass(frozen=True, slots=True, eq=False)
class BlockStep:
    """One node of a block: a layer to tune, an activation, or a join (neither of the two)."""

    node: ir.Node
    unit: Unit | None
    activation: Activation | None


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A block that can be computed on its own.

    Attributes:
        entry: the tensor that splits; it is stored as codes.
        output: the joined tensor, behind its activation where there is one.
        steps: the nodes in graph order.
    """

    entry: str
    output: str
    steps: tuple[BlockStep, ...]

    @property
    def units(self) -> tuple[Unit, ...]:
        """The layers to tune."""
        return tuple(step.unit for step in self.steps if step.unit is not None)

    @property
    def name(self) -> str:
        """The names of its layers."""
        return "+".join(unit.layer.name for unit in self.units)


def with_blocks(graph: ir.Graph, units: Sequence[Unit], state: QuantState) -> tuple[Unit | Block, ...]:
    """The units in graph order, those of a block gathered where its first one was.

    Raises:
        RecipeError: the graph has no block that could be tuned as a whole.
    """
    by_node = {unit.layer.name: unit for unit in units}
    owner: dict[str, Block] = {}
    for block in _blocks(graph, by_node, state):
        names = [unit.layer.name for unit in block.units]
        if names and not any(name in owner for name in names):
            owner |= dict.fromkeys(names, block)
    if not owner:
        raise RecipeError(
            "Block-wise tuning is not available for this graph.",
            where="improve.finetune.block_wise",
            observed="no Add joins two ways of plain layers and activations from one quantized tensor",
            hint="Set improve.finetune.block_wise: false.",
        )
    items: dict[int, Unit | Block] = {}
    for unit in units:
        item = owner.get(unit.layer.name, unit)
        items.setdefault(id(item), item)
    return tuple(items.values())


def _blocks(graph: ir.Graph, units: Mapping[str, Unit], state: QuantState) -> list[Block]:
    order = {node: index for index, node in enumerate(graph)}
    found = []
    for node in graph:
        if node.op_type != "Add" or any(v is None or is_constant(v) for v in node.inputs):
            continue
        entry = _split(node, order)
        if entry is None or entry.name not in state.plan.tensors:
            continue
        block = _block(node, entry, order, units, state)
        if block is not None:
            found.append(block)
    return found


def _split(add: ir.Node, order: Mapping[ir.Node, int]) -> ir.Value | None:
    """The last tensor that both inputs of the Add come from."""
    left, right = (_sources(value) for value in add.inputs)
    found, latest = None, -2
    for value in left:
        producer = value.producer()
        rank = -1 if producer is None else order[producer]
        if value in right and rank > latest:
            found, latest = value, rank
    return found


def _sources(value: ir.Value | None) -> dict[ir.Value, None]:
    """The value and everything computed that it depends on."""
    found: dict[ir.Value, None] = {}
    stack = [value]
    while stack:
        item = stack.pop()
        if item is None or item in found or is_constant(item):
            continue
        found[item] = None
        producer = item.producer()
        stack.extend(producer.inputs if producer is not None else ())
    return found


def _block(
    add: ir.Node,
    entry: ir.Value,
    order: Mapping[ir.Node, int],
    units: Mapping[str, Unit],
    state: QuantState,
) -> Block | None:
    """The block of an Add, if it is closed and made of nodes that torch can compute here."""
    inside = {add}
    stack = list(add.inputs)
    while stack:
        value = stack.pop()
        producer = value.producer() if value is not None else None
        if value is entry or value is None or is_constant(value):
            continue
        if producer is None:
            return None  # another graph input
        if producer not in inside:
            inside.add(producer)
            stack.extend(producer.inputs)
    for node in inside - {add}:
        out = node.outputs[0]
        if out.is_graph_output() or any(use.node not in inside for use in out.uses()):
            return None
    last = add
    behind = only_reader(add.outputs[0])
    if (
        behind is not None
        and behind.op_type in _ACTIVATIONS
        and add.outputs[0].name not in state.plan.tensors
    ):
        inside.add(behind)
        last = behind
    steps = [_step(node, units, state) for node in sorted(inside, key=order.__getitem__)]
    if None in steps:
        return None
    return Block(
        str(entry.name), str(last.outputs[0].name), tuple(step for step in steps if step is not None)
    )


def _step(node: ir.Node, units: Mapping[str, Unit], state: QuantState) -> BlockStep | None:
    unit = units.get(str(node.name))
    if unit is not None:
        unusual = unit.normalizes or "output_padding" in node.attributes
        return None if unusual else BlockStep(node, unit, None)
    if node.op_type in _JOINS and not any(v is None or is_constant(v) for v in node.inputs):
        return BlockStep(node, None, None)
    if node.op_type in _ACTIVATIONS:
        activation = read_activation(node, node, state)
        return None if activation is None else BlockStep(node, None, activation)
    return None
