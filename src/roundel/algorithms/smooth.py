"""SmoothQuant: outliers of a layer's input move into its weights. Exact in float."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from roundel.algorithms.layer_report import LayerReport
from roundel.algorithms.linear_layers import read_linear
from roundel.algorithms.smooth_choice import (
    CANDIDATES,
    Choice,
    Maker,
    Storage,
    choose,
    storage,
    weight_scheme,
)
from roundel.algorithms.smooth_groups import Group, Seen
from roundel.algorithms.smooth_trace import Edits, trace
from roundel.algorithms.splice import splice
from roundel.passes.rewriting import Editor
from roundel.plan.types import QuantPlan
from roundel.recipe import Recipe


@dataclass(frozen=True, slots=True)
class SmoothReport:
    """What became of one group of layers.

    Attributes:
        tensor: what the layers read.
        layers: held-out error of each layer's output before and after; empty where nothing was tried.
        kept: whether the tensor's channels were rescaled.
        alpha: the share that was chosen; None where the layers stay as they are.
        where: what took the factors, or why nothing did.
    """

    tensor: str
    layers: tuple[LayerReport, ...]
    kept: bool
    alpha: float | None
    where: str


def smooth(
    model: ir.Model, groups: tuple[Group, ...], seen: Mapping[str, Seen], plan: QuantPlan, recipe: Recipe
) -> tuple[SmoothReport, ...]:
    """Rescale the inputs of layers channel by channel, in place, where their held-out error falls.

    The model computes what it did before, for every input, up to the rounding of float32.

    Args:
        model: prepared, with current shapes.
        groups: of this model.
        seen: what the data shows of each group's tensor.
        plan: of this model: says how each tensor is stored.
        recipe: `improve.smooth` has the options.
    """
    options, editor = recipe.improve.smooth, Editor(model)
    alphas = CANDIDATES if options.alpha == "auto" else (options.alpha,)
    reports = []
    # Last first: the factors behind a layer change its columns, and so the largest weight of each row.
    for group in reversed(groups):
        stored = storage(group, plan, recipe)
        edits = None if group.shared else trace(group.value)
        if stored.data is None or (edits is None and not options.insert):
            reports.append(_left(group, stored))
            continue
        start = time.perf_counter()
        choice = choose(group, seen[group.name], stored, _maker(edits, seen, plan), alphas)
        if choice.alpha is not None:
            _apply(editor, group, choice, edits)
        reports.append(_told(group, choice, edits, time.perf_counter() - start))
    return tuple(reversed(reports))


def _maker(edits: Edits | None, seen: Mapping[str, Seen], plan: QuantPlan) -> Maker | None:
    """The quantized layer among the places that take the factors."""
    for edit in edits or ():
        layer, given = read_linear(edit.node), edit.node.inputs[0]
        scheme = None if layer is None else weight_scheme(layer, plan)
        data = None if given is None else seen.get(str(given.name))
        if layer is not None and scheme is not None and data is not None and edit.index == 1:
            return Maker(layer.weight, edit.channels.reshape(-1), scheme, data.rows)
    return None


def _apply(editor: Editor, group: Group, choice: Choice, edits: Edits | None) -> None:
    if edits is None:
        readers = [(layer.node, 0) for layer in group.layers]
        inverse = (1 / choice.factors).astype(group.layers[0].weight.dtype)
        splice(editor, group.value, "Mul", inverse, readers=readers, outputs=False)
    else:
        for edit in edits:
            edit.apply(editor, choice.factors)
    for layer in group.layers:
        layer.set_weight(editor, layer.weight.astype(np.float64) * choice.factors[:, None])


def _left(group: Group, stored: Storage) -> SmoothReport:
    if stored.data is None:
        why = "the tensor is not stored in integers"
    elif group.shared:
        why = "others see the tensor, too"
    else:
        why = "nothing above can take the factors"
    return SmoothReport(group.name, (), False, None, why)


def _told(group: Group, choice: Choice, edits: Edits | None, seconds: float) -> SmoothReport:
    kept = choice.alpha is not None
    if not kept:
        where = "the error of the layers does not fall"
    elif edits is None:
        where = "a Mul in front of the layers"
    else:
        where = "folded into " + " and ".join(dict.fromkeys(edit.node.op_type for edit in reversed(edits)))
    share = seconds / len(group.layers)
    layers = tuple(
        LayerReport(layer.name, layer.node.op_type, _decibel(before), _decibel(after), kept, share)
        for layer, before, after in zip(group.layers, choice.before, choice.after, strict=True)
    )
    return SmoothReport(group.name, layers, kept, choice.alpha, where)


def _decibel(error: float) -> float:
    return math.inf if error == 0 else -10 * math.log10(error)
