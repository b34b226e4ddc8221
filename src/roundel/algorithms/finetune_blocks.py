"""Residual blocks: the layers between a tensor that splits and the Add that joins its ways again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from roundel.algorithms.finetune_units import Activation, Unit, read_activation
from roundel.calibrate.state import QuantState
from roundel.errors import RecipeError
from roundel.model.graph import is_constant, only_reader

_ACTIVATIONS = ("Relu", "LeakyRelu", "Gelu", "Tanh", "Clip", "Sigmoid", "HardSigmoid")
_JOINS = ("Add", "Mul")


@dataclass(frozen=True, slots=True, eq=False)
class Step:
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
    steps: tuple[Step, ...]

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


def _step(node: ir.Node, units: Mapping[str, Unit], state: QuantState) -> Step | None:
    unit = units.get(str(node.name))
    if unit is not None:
        unusual = unit.normalizes or "output_padding" in node.attributes
        return None if unusual else Step(node, unit, None)
    if node.op_type in _JOINS and not any(v is None or is_constant(v) for v in node.inputs):
        return Step(node, None, None)
    if node.op_type in _ACTIVATIONS:
        activation = read_activation(node, node, state)
        return None if activation is None else Step(node, None, activation)
    return None
