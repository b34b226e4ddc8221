"""Layers: nodes with the tensors that quantizing them stores."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from roundel.calibrate.state import QuantState
from roundel.model.graph import is_constant, values_by_name
from roundel.plan.types import Role
from roundel.targets.operators import FUSING_CONSUMERS

# These give values that they were given: with one scale before and behind, nothing is rounded anew.
_CARRIERS = frozenset(
    {
        "Concat",
        "DepthToSpace",
        "Flatten",
        "Gather",
        "Identity",
        "MaxPool",
        "Reshape",
        "Slice",
        "SpaceToDepth",
        "Split",
        "Squeeze",
        "Transpose",
        "Unsqueeze",
    }
)


@dataclass(frozen=True, slots=True)
class Layer:
    """A node, with those that compute as one with it or only carry its result on.

    Attributes:
        name: of the first node.
        op: its operator.
        nodes: names of all.
        activations: stored tensors whose rounding is this layer's: its outputs, and a graph input.
        weights: constants that it reads.
        touched: every stored activation around its nodes, which an override of them changes.
    """

    name: str
    op: str
    nodes: tuple[str, ...]
    activations: tuple[str, ...]
    weights: tuple[str, ...]
    touched: tuple[str, ...]


@dataclass(slots=True, eq=False)
class _Draft:
    first: ir.Node
    nodes: list[ir.Node]
    activations: list[str]
    weights: list[str]


def layers_of(model: ir.Model, state: QuantState) -> tuple[Layer, ...]:
    """The quantized layers in graph order; each stored integer tensor is rounded in one of them at most."""
    drafts: dict[str, _Draft] = {}
    homes: dict[str, _Draft] = {}
    for node in model.graph:
        verdict = state.plan.nodes.get(str(node.name))
        if verdict is None or not verdict.quantized:
            continue
        before = _continued(node, state, homes)
        home = before or _Draft(node, [], [], [])
        if before is None:
            drafts[str(node.name)] = home
        home.nodes.append(node)
        homes[str(node.name)] = home
    _share_out(model, state, homes)
    stored = {name for name, tensor in state.plan.tensors.items() if tensor.role is Role.ACTIVATION}
    found = [_finished(draft, stored) for draft in drafts.values()]
    return tuple(layer for layer in found if layer.activations or layer.weights)


def _continued(node: ir.Node, state: QuantState, homes: dict[str, _Draft]) -> _Draft | None:
    """The layer that this node is a part of: it fuses with its maker, or carries what that stored."""
    source = node.inputs[0] if node.inputs else None
    maker = source.producer() if source is not None else None
    home = homes.get(str(maker.name)) if maker is not None else None
    if source is None or home is None:
        return None
    fused = node.op_type in FUSING_CONSUMERS and source.name not in state.plan.tensors
    single = node.op_type != "Concat" and _carried(node, state)
    return home if fused or single else None


def _carried(node: ir.Node, state: QuantState) -> bool:
    """Whether the node's outputs are stored exactly as its inputs are."""
    if node.op_type not in _CARRIERS:
        return False
    operands = node.inputs if node.op_type == "Concat" else node.inputs[:1]
    params = [state.params.get(str(v.name)) for v in (*operands, *node.outputs) if v is not None]
    first = params[0]
    return first is not None and all(p is not None and first.same_as(p) for p in params)


def _share_out(model: ir.Model, state: QuantState, homes: dict[str, _Draft]) -> None:
    """Give each stored tensor to the layer that makes it, or else to the first that reads it."""
    values = values_by_name(model.graph)
    for name in state.plan.tensors:
        value = values[name]
        if not state.plan.in_integers(name):
            continue
        maker = value.producer()
        if maker is not None and _carried(maker, state):
            continue
        home = homes.get(str(maker.name)) if maker is not None else None
        if home is None:
            readers = (homes.get(str(use.node.name)) for use in value.uses())
            home = next((draft for draft in readers if draft is not None), None)
        if home is not None:
            (home.weights if is_constant(value) else home.activations).append(name)


def _finished(draft: _Draft, stored: set[str]) -> Layer:
    around = [str(v.name) for node in draft.nodes for v in (*node.inputs, *node.outputs) if v is not None]
    return Layer(
        str(draft.first.name),
        draft.first.op_type,
        tuple(str(node.name) for node in draft.nodes),
        tuple(draft.activations),
        tuple(draft.weights),
        tuple(name for name in dict.fromkeys(around) if name in stored),
    )
