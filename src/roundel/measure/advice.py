"""What would help a layer, in words that the command line takes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.calibrate.collect import collect
from roundel.calibrate.observers import Observer, StatKind
from roundel.calibrate.ranges import choose_weight
from roundel.calibrate.resolve import weight_method
from roundel.measure.layers import Head, LayerCost, Remedy, RemedyKind, StoredLayer
from roundel.model.graph import constant_array, is_constant, is_float32
from roundel.numerics.affine import fake_quantize
from roundel.plan.float_parts import sums_distribution, tail_of
from roundel.plan.types import QuantPlan
from roundel.recipe.settings import Recipe
from roundel.state import State
from roundel.targets.operators import Trait, ops_with
from roundel.types import PerChannel, PerTensor, Sample

_WIDER = {"int8": "int16", "uint8": "uint16"}
_HALF = 0.5
_CHANNEL_AXES = {"Conv": 0, "ConvTranspose": 1}


def remedies(
    layer: StoredLayer, cost: LayerCost, model: ir.Model, state: State, recipe: Recipe
) -> tuple[Remedy, ...]:
    """What would help, best first; leaving the layer in float always does."""
    found = []
    share = cost.activations / cost.cost
    wide = widening(layer, cost, state, recipe)
    if wide is not None:
        why = f"{share:.0%} of its cost is its activations' rounding"
        found.append(_overridden(RemedyKind.A16W8, layer, {"type": wide}, why))
    else:
        found += _for_weights(layer, share, model, state, recipe)
    words = " ".join(f"--exclude {shlex.quote(name)}" for name in layer.nodes)
    found.append(Remedy(RemedyKind.EXCLUDE, words, "in float it costs nothing, and leaves the NPU"))
    return tuple(found)


def widening(layer: StoredLayer, cost: LayerCost, state: State, recipe: Recipe) -> str | None:
    """The 16-bit type for its activations, where that is what helps first."""
    return wider(state, layer.touched, recipe) if cost.activations >= _HALF * cost.cost else None


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


def wider(state: State, names: Sequence[str], recipe: Recipe) -> str | None:
    """The 16-bit type for these activations; None where they have one, or the NPU's engine is for 8 bits."""
    types = {state.params[name].qtype.value for name in names if name in state.params}
    found = {_WIDER[t] for t in types if t in _WIDER}
    return found.pop() if len(found) == 1 and not recipe.npu.limits else None


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


def _power(error: NDArray[Any]) -> float:
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
            ratio = _apart(node, stats)
            if ratio >= _APART:
                yield f"Concat '{node.name}' joins tensors whose ranges differ {ratio:.0f} times"
        elif node.op_type in _SELECTION:
            yield f"{node.op_type} chooses among boxes"
        elif node.op_type in _ARITHMETIC and any(_is_grid(value) for value in node.inputs):
            yield "a grid of anchors or strides is applied (box decoding)"


def _apart(node: ir.Node, stats: Mapping[str, Observer]) -> float:
    """How many times the largest range of a Concat's inputs is the smallest."""
    seen = [stats[str(v.name)] for v in node.inputs if v is not None and str(v.name) in stats]
    reach = [max(abs(s.low), abs(s.high)) for s in seen]
    reach = [size for size in reach if size > 0]
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
