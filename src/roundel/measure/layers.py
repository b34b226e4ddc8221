"""Layers as sensitivity ranks them, and what would help each."""

from __future__ import annotations

import enum
import json
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from roundel.calibrate.collect import collect
from roundel.calibrate.observers import Observer, StatKind
from roundel.calibrate.ranges import choose_weight
from roundel.calibrate.resolve import weight_method
from roundel.model.graph import constant_array, is_constant, is_float32, values_by_name
from roundel.numerics.affine import fake_quantize
from roundel.plain import Card, counted, decibel, to_plain
from roundel.plan.float_parts import sums_distribution, tail_of
from roundel.plan.types import QuantPlan, Role
from roundel.recipe.settings import Recipe
from roundel.state import State
from roundel.targets.operators import FUSING_CONSUMERS, Trait, ops_with
from roundel.types import Array, PerChannel, PerTensor, Sample


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
        share: of the finite costs of all layers; 1 where this one's is infinite, since rounding it makes the
            outputs infinite or NaN.
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

    @property
    def moving(self) -> float:
        """The activations' part of it, 0 to 1."""
        if math.isfinite(self.cost):
            return self.activations / self.cost if self.cost > 0 else 0.0
        return float(not math.isfinite(self.activations))

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
    return tuple(_finished(one, stored) for one in drafts.values() if one.activations or one.weights)


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


_WIDER = {"int8": "int16", "uint8": "uint16"}
_HALF = 0.5
_CHANNEL_AXES = {"Conv": 0, "ConvTranspose": 1}


def remedies(
    layer: StoredLayer, cost: LayerCost, model: ir.Model, state: State, recipe: Recipe
) -> tuple[Remedy, ...]:
    """What would help, best first; leaving the layer in float always does."""
    share, wide = cost.moving, widening(layer, cost, state, recipe)
    if wide is None:
        found = list(_for_weights(layer, share, model, state, recipe))
    else:
        why = f"{share:.0%} of its cost is its activations' rounding"
        found = [_overridden(RemedyKind.A16W8, layer, {"type": wide}, why)]
    words = " ".join(f"--exclude {shlex.quote(name)}" for name in layer.nodes)
    return (*found, Remedy(RemedyKind.EXCLUDE, words, "in float it costs nothing, and leaves the NPU"))


def widening(layer: StoredLayer, cost: LayerCost, state: State, recipe: Recipe) -> str | None:
    """The 16-bit type for its activations, where that is what helps first.

    None where they have one, or the NPU's engine is for 8 bits.
    """
    types = {state.params[name].qtype.value for name in layer.touched if name in state.params}
    found = {_WIDER[t] for t in types if t in _WIDER}
    helps = cost.activations >= _HALF * cost.cost and not recipe.npu.limits
    return found.pop() if helps and len(found) == 1 else None


def _for_weights(
    layer: StoredLayer, share: float, model: ir.Model, state: State, recipe: Recipe
) -> Iterator[Remedy]:
    gain = _channel_gain(layer, model, state, recipe) if share < _HALF else None
    if gain is not None:
        why = f"its weights' own error falls by {gain:.0%} with a scale for each channel"
        yield _overridden(RemedyKind.PER_CHANNEL, layer, {"per_channel": True}, why)
    if not layer.weights:
        return
    if recipe.effort == "none":
        why = "rounding chosen by what the layers give makes up for a part of the error"
        yield Remedy(RemedyKind.FINETUNE, "--effort fast", why)
    elif recipe.finetuning == "none":
        yield Remedy(
            RemedyKind.FINETUNE, "--effort high", "gradients choose its weights' rounding (needs torch)"
        )


def combined(worst: Sequence[LayerCost], recipe: Recipe) -> str | None:
    """One command line's words for the first remedy of each; overrides of the recipe itself stay."""
    first = [layer.remedies[0] for layer in worst]
    overrides = [remedy.override for remedy in first if remedy.override is not None]
    words = [remedy.option for remedy in first if remedy.override is None]
    if overrides:
        kept = [o.model_dump(mode="json", exclude_defaults=True) for o in recipe.overrides]
        words = [_setting([*kept, *overrides]), *words]
    return " ".join(dict.fromkeys(words)) or None


def _overridden(kind: RemedyKind, layer: StoredLayer, what: Mapping[str, Any], why: str) -> Remedy:
    override = {"nodes": list(layer.nodes), **what}
    return Remedy(kind, _setting([override]), why, override)


def _setting(overrides: Sequence[Mapping[str, Any]]) -> str:
    """The --set option with these overrides."""
    return "-s " + shlex.quote("overrides=" + json.dumps(overrides))


def _channel_gain(layer: StoredLayer, model: ir.Model, state: State, recipe: Recipe) -> float | None:
    """Share of the weights' own error that scales for each channel take away; None below a half."""
    axis = _CHANNEL_AXES.get(layer.op)
    if axis is None or recipe.npu.limits:
        return None
    before = after = 0.0
    for name in layer.weights:
        array, scheme = constant_array(model.graph.initializers.get(name)), state.plan.tensors[name].integer
        if array is None or array.ndim < 2 or scheme.granularity != PerTensor():
            continue
        finer = replace(scheme, granularity=PerChannel(axis))
        params = choose_weight(weight_method(recipe.weights), array, finer)
        before += _power(fake_quantize(array, state.params[name], narrow=scheme.symmetric) - array)
        after += _power(fake_quantize(array, params, narrow=scheme.symmetric) - array)
    gain = 1 - after / before if before > 0 else 0.0
    return gain if gain >= _HALF else None


def _power(error: Array) -> float:
    flat = np.asarray(error, np.float64).ravel()
    return float(flat @ flat)


_ARITHMETIC = ops_with(Trait.ARITHMETIC)
_SELECTION = frozenset({"NonMaxSuppression", "TopK"})
_APART = 16.0  # times; what a quantizer of 8 bits leaves for the smaller tensor is then 4 bits
_GRID = 16  # positions; fewer constants are no grid of anchors


def find_head(model: ir.Model, plan: QuantPlan, samples: Sequence[Sample]) -> Head | None:
    """The head, if the graph ends in one and any of it would be quantized."""
    tail = tail_of(model.graph)
    signs = tuple(dict.fromkeys(_signs(tail, _joined(model, tail, samples))))
    quantized = tuple(str(n.name) for n in tail if (v := plan.nodes.get(str(n.name))) and v.quantized)
    if not signs or not quantized:
        return None
    return Head(signs, quantized, _option(model.graph, tail))


def _joined(model: ir.Model, tail: Iterable[ir.Node], samples: Sequence[Sample]) -> Mapping[str, Observer]:
    """Ranges of what the tail's Concats join; where their scales align, calibration saw the result only."""
    values = [value for node in tail if node.op_type == "Concat" for value in node.inputs]
    names = [str(v.name) for v in values if is_float32(v) and not is_constant(v) and v is not None]
    return collect(model, dict.fromkeys(names, StatKind.MINMAX), samples, keep=0).stats if names else {}


def _signs(tail: Iterable[ir.Node], stats: Mapping[str, Observer]) -> Iterable[str]:
    for node in tail:
        if sums_distribution(node):
            yield "a distribution over distances is summed up (DFL)"
        elif node.op_type == "Concat":
            if (ratio := _apart(node, stats)) >= _APART:
                yield f"Concat '{node.name}' joins tensors whose ranges differ {ratio:.0f} times"
        elif node.op_type in _SELECTION:
            yield f"{node.op_type} chooses among boxes"
        elif node.op_type in _ARITHMETIC and any(_is_grid(value) for value in node.inputs):
            yield "a grid of anchors or strides is applied (box decoding)"


def _apart(node: ir.Node, stats: Mapping[str, Observer]) -> float:
    """How many times the largest range of a Concat's inputs is the smallest."""
    seen = [stats[str(v.name)] for v in node.inputs if v is not None and str(v.name) in stats]
    reach = [size for s in seen if (size := max(abs(s.low), abs(s.high))) > 0]
    return max(reach) / min(reach) if len(reach) > 1 else 1.0


def _is_grid(value: ir.Value | None) -> bool:
    """Constants that differ from place to place."""
    array = constant_array(value) if is_constant(value) else None
    if array is None or array.dtype.kind != "f" or array.size < _GRID:
        return False
    return len(np.unique(array)) > 1 and max(array.shape) >= _GRID


def _option(graph: ir.Graph, tail: list[ir.Node]) -> str:
    """The whole tail between the nodes that it begins with and those that it ends in."""
    inside = set(tail)
    starts = [n for n in tail if not any(p in inside for p in n.predecessors())]
    ends = [n for n in tail if not any(s in inside for s in n.successors())]
    words = "->".join(",".join(str(n.name) for n in nodes) for nodes in (starts, ends))
    return f"--exclude-subgraph {shlex.quote(words)}"
