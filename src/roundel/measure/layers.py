"""What a look at the layers' sensitivity finds."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from roundel.card import Card, counted, decibel
from roundel.model.graph import is_constant, values_by_name
from roundel.plain import to_plain
from roundel.plan.types import Role
from roundel.state import State
from roundel.targets.operators import FUSING_CONSUMERS, Trait, ops_with


class RemedyKind(enum.Enum):
    """Ways to make a layer cost less."""

    A16W8 = "A16W8"
    PER_CHANNEL = "per-channel"
    FINETUNE = "fine-tune"
    EXCLUDE = "exclude"


@dataclass(frozen=True, slots=True)
class Remedy:
    """One way to make it cost less.

    Attributes:
        kind: which.
        option: the words for it on the command line of `roundel quantize`.
        why: it should help.
        override: the entry of the recipe's `overrides`, where it is one.
    """

    kind: RemedyKind
    option: str
    why: str
    override: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class LayerCost:
    """What quantizing one layer alone costs at the outputs.

    Attributes:
        name: of its first node.
        op: that node's operator.
        nodes: of the layer.
        activations: error power over signal power with only its activations rounded.
        weights: with only its constants rounded.
        share: of the costs of all layers.
        left: the same, less what 16-bit activations of the layers above it in the ranking take away.
        won_back: share of the quantized model's error power that is gone when the first remedy is applied to
            this layer and all above it (at most, where it is about weights: their error is taken away
            whole); None where that was not measured.
        remedies: what would help, best first; empty for layers that cost little.
    """

    name: str
    op: str
    nodes: tuple[str, ...]
    activations: float
    weights: float
    share: float
    left: float = 0.0
    won_back: float | None = None
    remedies: tuple[Remedy, ...] = ()

    @property
    def cost(self) -> float:
        """Both together."""
        return self.activations + self.weights

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dict(to_plain(self), cost=to_plain(self.cost), sqnr_db=to_plain(cost_db(self.cost)))


@dataclass(frozen=True, slots=True)
class Head:
    """A detection head: what turns the last layers' results into boxes and scores.

    Attributes:
        signs: what gave it away.
        nodes: quantized nodes of it.
        option: the words that keep all of it in float.
        share: of the costs of all layers.
    """

    signs: tuple[str, ...]
    nodes: tuple[str, ...]
    option: str
    share: float = 0.0


@dataclass(frozen=True, slots=True, repr=False)
class Sensitivity(Card):
    """The ranking.

    Attributes:
        model: file name.
        recipe: by name.
        samples: how many each layer was measured with.
        sqnr_db: of the whole quantized model on the samples of the check.
        layers: the most costly first, by what is left of their costs.
        together: options that apply the first remedies of the worst layers at once.
        head: a detection head, where there is one.
        seconds: the whole took.
        notes: what a careful reader wants to know.
    """

    model: str
    recipe: str
    samples: int
    sqnr_db: float | None
    layers: tuple[LayerCost, ...]
    together: str | None
    head: Head | None
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> tuple[LayerCost, ...]:
        """The layers for which something is proposed."""
        return tuple(layer for layer in self.layers if layer.remedies)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**to_plain(self), "layers": [layer.to_dict() for layer in self.layers]}

    def card(self) -> Mapping[str, object]:
        """The main figures."""
        return {
            "model": f"{self.model}, {self.recipe}, {counted(self.samples, 'sample')}",
            "outputs": decibel(math.inf if self.sqnr_db is None else self.sqnr_db),
            "layers": len(self.layers),
            "worst": ", ".join(f"{layer.name} {layer.left:.1%}" for layer in self.layers[:3]),
        }


def cost_db(power: float) -> float | None:
    """SQNR of an error of this relative power; None without any."""
    return -10 * math.log10(power) if power > 0 else None


# These give values that they were given: with one scale before and behind, nothing is rounded anew.
_CARRIERS = ops_with(Trait.SHAPES | Trait.REARRANGES | Trait.SELECTS | Trait.JOINS | Trait.MAXIMUM)


@dataclass(frozen=True, slots=True)
class StoredLayer:
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


def layers_of(model: ir.Model, state: State) -> tuple[StoredLayer, ...]:
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


def _continued(node: ir.Node, state: State, homes: dict[str, _Draft]) -> _Draft | None:
    """The layer that this node is a part of: it fuses with its maker, or carries what that stored."""
    source = node.inputs[0] if node.inputs else None
    maker = source.producer() if source is not None else None
    home = homes.get(str(maker.name)) if maker is not None else None
    if source is None or home is None:
        return None
    fused = node.op_type in FUSING_CONSUMERS and source.name not in state.plan.tensors
    single = node.op_type != "Concat" and _carried(node, state)
    return home if fused or single else None


def _carried(node: ir.Node, state: State) -> bool:
    """Whether the node's outputs are stored exactly as its inputs are."""
    if node.op_type not in _CARRIERS:
        return False
    operands = node.inputs if node.op_type == "Concat" else node.inputs[:1]
    params = [state.params.get(str(v.name)) for v in (*operands, *node.outputs) if v is not None]
    first = params[0]
    return first is not None and all(p is not None and first.same_as(p) for p in params)


def _share_out(model: ir.Model, state: State, homes: dict[str, _Draft]) -> None:
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


def _finished(draft: _Draft, stored: set[str]) -> StoredLayer:
    around = [str(v.name) for node in draft.nodes for v in (*node.inputs, *node.outputs) if v is not None]
    return StoredLayer(
        str(draft.first.name),
        draft.first.op_type,
        tuple(str(node.name) for node in draft.nodes),
        tuple(draft.activations),
        tuple(draft.weights),
        tuple(name for name in dict.fromkeys(around) if name in stored),
    )
