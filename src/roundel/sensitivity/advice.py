"""What would help a layer, in words that the command line takes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.calibrate.ranges import choose_weight
from roundel.calibrate.resolve import weight_method
from roundel.calibrate.state import QuantState
from roundel.model.graph import constant_array
from roundel.numerics.affine import fake_quantize
from roundel.recipe import Recipe
from roundel.sensitivity.layers import Layer
from roundel.sensitivity.types import Kind, LayerCost, Remedy
from roundel.types import PerChannel, PerTensor

_WIDER = {"int8": "int16", "uint8": "uint16"}
_HALF = 0.5
_CHANNEL_AXES = {"Conv": 0, "ConvTranspose": 1}


def remedies(
    layer: Layer, cost: LayerCost, model: ir.Model, state: QuantState, recipe: Recipe
) -> tuple[Remedy, ...]:
    """What would help, best first; leaving the layer in float always does."""
    found = []
    share = cost.activations / cost.cost
    wide = widening(layer, cost, state, recipe)
    if wide is not None:
        why = f"{share:.0%} of its cost is its activations' rounding"
        found.append(_overridden(Kind.A16W8, layer, {"type": wide}, why))
    else:
        found += _for_weights(layer, share, model, state, recipe)
    words = " ".join(f"--exclude {shlex.quote(name)}" for name in layer.nodes)
    found.append(Remedy(Kind.EXCLUDE, words, "in float it costs nothing, and leaves the NPU"))
    return tuple(found)


def widening(layer: Layer, cost: LayerCost, state: QuantState, recipe: Recipe) -> str | None:
    """The 16-bit type for its activations, where that is what helps first."""
    return wider(state, layer.touched, recipe) if cost.activations >= _HALF * cost.cost else None


def _for_weights(
    layer: Layer, share: float, model: ir.Model, state: QuantState, recipe: Recipe
) -> Iterator[Remedy]:
    gain = _channel_gain(layer, model, state, recipe) if share < _HALF else None
    if gain is not None:
        why = f"its weights' own error falls by {gain:.0%} with a scale for each channel"
        yield _overridden(Kind.PER_CHANNEL, layer, {"per_channel": True}, why)
    if not layer.weights:
        return
    if recipe.effort == "none":
        why = "rounding chosen by what the layers give makes up for a part of the error"
        yield Remedy(Kind.FINETUNE, "--effort fast", why)
    elif recipe.finetuning == "none":
        yield Remedy(Kind.FINETUNE, "--effort high", "gradients choose its weights' rounding (needs torch)")


def together(worst: Sequence[LayerCost], recipe: Recipe) -> str | None:
    """One command line's words for the first remedy of each; overrides of the recipe itself stay."""
    first = [layer.remedies[0] for layer in worst]
    overrides = [remedy.override for remedy in first if remedy.override is not None]
    words = [remedy.option for remedy in first if remedy.override is None]
    if overrides:
        kept = [o.model_dump(mode="json", exclude_defaults=True) for o in recipe.overrides]
        words = [_setting([*kept, *overrides]), *words]
    return " ".join(dict.fromkeys(words)) or None


def _overridden(kind: Kind, layer: Layer, what: Mapping[str, Any], why: str) -> Remedy:
    override = {"nodes": list(layer.nodes), **what}
    return Remedy(kind, _setting([override]), why, override)


def _setting(overrides: Sequence[Mapping[str, Any]]) -> str:
    """The --set option with these overrides."""
    return "-s " + shlex.quote("overrides=" + json.dumps(overrides))


def wider(state: QuantState, names: Sequence[str], recipe: Recipe) -> str | None:
    """The 16-bit type for these activations; None where they have one, or the NPU's engine is for 8 bits."""
    types = {state.params[name].qtype.value for name in names if name in state.params}
    found = {_WIDER[t] for t in types if t in _WIDER}
    return found.pop() if len(found) == 1 and not recipe.npu.limits else None


def _channel_gain(layer: Layer, model: ir.Model, state: QuantState, recipe: Recipe) -> float | None:
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
