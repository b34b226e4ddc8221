"""Layers that read the same tensor, and what the data shows of its channels."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.calibrate.runner import Runner
from roundel.errors import DataError
from roundel.improve.trace import Edits, trace
from roundel.model.edit import Editor
from roundel.model.graph import dims
from roundel.model.layers import Layer, read_linear
from roundel.numerics.affine import fake_quantize, params_from_range, weight_params
from roundel.numerics.metrics import decibels
from roundel.numerics.rounding import one_blas_thread
from roundel.plan.types import QuantPlan
from roundel.recipe.settings import Recipe
from roundel.state import LayerReport
from roundel.types import Doubles, PerChannel, QType, Sample, Scheme

_ROW_BYTES = 128_000_000  # of all groups together
_MOST_ROWS = 512


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Layers that read one tensor along its last axis.

    Attributes:
        value: the tensor.
        layers: its readers with constant weights.
        shared: whether anything else sees it: another node, a graph output, a body.
    """

    value: ir.Value
    layers: tuple[Layer, ...]
    shared: bool

    @property
    def name(self) -> str:
        """The tensor's name."""
        return str(self.value.name)

    @property
    def channels(self) -> int:
        """How many inputs the layers have."""
        return int(self.layers[0].operand.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class ChannelsSeen:
    """What the data shows of one tensor.

    Attributes:
        low: the smallest value of each channel.
        high: the largest.
        rows: some rows of samples that low and high have not seen, for judging.
    """

    low: NDArray[np.float64]
    high: NDArray[np.float64]
    rows: NDArray[np.float32]

    @property
    def magnitudes(self) -> NDArray[np.float64]:
        """The largest absolute value of each channel."""
        return np.maximum(np.abs(self.low), np.abs(self.high))


def find_groups(graph: ir.Graph, plan: QuantPlan) -> tuple[Group, ...]:
    """The groups with at least one quantized layer, in graph order."""
    found: dict[ir.Value, list[Layer]] = {}
    for node in graph:
        layer = read_linear(node)
        value = node.inputs[0] if layer is not None else None
        if layer is not None and value is not None and (dims(value) or (None,))[-1] == layer.operand.shape[0]:
            found.setdefault(value, []).append(layer)
    return tuple(
        Group(value, tuple(layers), len(value.uses()) > len(layers) or value.is_graph_output())
        for value, layers in found.items()
        if any(plan.nodes[layer.name].quantized for layer in layers)
    )


def look_at_channels(
    model: ir.Model, groups: Sequence[Group], learn: Sequence[Sample], judge: Sequence[Sample]
) -> dict[str, ChannelsSeen]:
    """Run the samples, one at a time: the extremes of each channel, and rows to judge by.

    Args:
        model: the float model; it is not changed.
        groups: whose tensors to look at.
        learn: samples that give the extremes.
        judge: samples that give the rows.

    Raises:
        DataError: a sample does not fit the model, or a tensor is not finite.
        ModelError: ONNX Runtime cannot run the model.
    """
    fed = {value.name for value in model.graph.inputs}
    names = [group.name for group in groups if group.name not in fed]
    runner = Runner(model, names, learn[0], cores=os.cpu_count() or 1, samples=1)
    width = {group.name: group.channels for group in groups}
    most = min(_MOST_ROWS, max(16, _ROW_BYTES // (4 * sum(width.values()))))
    low = {name: np.full(size, np.inf) for name, size in width.items()}
    high = {name: np.full(size, -np.inf) for name, size in width.items()}
    rows: dict[str, list[NDArray[Any]]] = {name: [] for name in width}
    for index, sample in enumerate((*learn, *judge)):
        given = {name: array for name, array in sample.items() if name in width}
        for run in runner.stream(sample, index, finals=False):
            for name, array in {**given, **run.tensors}.items():
                flat = array.reshape(-1, width[name])
                if not np.isfinite(flat).all():
                    raise _not_finite(name, index)
                if index < len(learn):
                    np.minimum(low[name], flat.min(axis=0), out=low[name])
                    np.maximum(high[name], flat.max(axis=0), out=high[name])
                else:
                    rows[name].append(_spread(flat, most // len(judge) or 1))
    return {name: ChannelsSeen(low[name], high[name], np.concatenate(rows[name])) for name in width}


def _not_finite(name: str, index: int) -> DataError:
    return DataError(
        "A tensor holds NaN or infinity.",
        where=f"tensor '{name}', sample {index}",
        expected="finite values",
        hint="Look at the node that makes it, and at the sample.",
    )


def _spread(flat: NDArray[Any], most: int) -> NDArray[Any]:
    """Rows at even distances, copied: the rest of the tensor must not stay in memory."""
    picked = np.linspace(0, len(flat) - 1, min(most, len(flat))).astype(int)
    return np.array(flat[picked], np.float32)


CANDIDATES = (0.0, 0.15, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_SMALLEST = 1e-5  # of the largest: a channel that is silent in the data, or that no layer reads, has a factor
_AT_RUN_TIME = Scheme(QType.UINT8, symmetric=False)


@dataclass(frozen=True, slots=True, eq=False)
class SmoothChoice:
    """The best factors and what they do.

    Attributes:
        alpha: the share of the difficulty that moves to the weights; None where the layers stay as they are.
        factors: what each input is divided by, and each row of the weights multiplied.
        before: error of each layer's output without factors, relative to its size.
        after: with them.
    """

    alpha: float | None
    factors: Doubles
    before: tuple[float, ...]
    after: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Maker:
    """A quantized layer that takes the factors into the columns of its weight.

    Attributes:
        weight: (inputs, outputs).
        channels: of each output; -1 where it is none of the group's.
        scheme: of the weight.
        rows: held-out inputs of the layer.
    """

    weight: NDArray[Any]
    channels: NDArray[np.int64]
    scheme: Scheme
    rows: NDArray[np.float32]

    def error(self, factors: Doubles) -> float:
        """What rounding its weight does to its output, relative to the output's size."""
        divisors = np.append(factors, 1.0)[self.channels]
        rounded = _as_stored(self.weight / divisors, self.scheme) * divisors
        return _square(self.rows @ (rounded - self.weight)) / _size(self.rows @ self.weight)


def storage(group: Group, plan: QuantPlan, recipe: Recipe) -> tuple[Scheme | None, ...]:
    """How the group's tensor and then each layer's weight, seen as (inputs, outputs), is stored."""
    if recipe.mode != "dynamic":
        return _integers(plan, group.name), *(weight_scheme(layer, plan) for layer in group.layers)
    whole = recipe.weights.scheme
    assert isinstance(whole, Scheme), "the recipe allows no other in this mode"
    chosen = [plan.nodes[layer.name].quantized for layer in group.layers]
    return _AT_RUN_TIME, *(whole if one else None for one in chosen)


def weight_scheme(layer: Layer, plan: QuantPlan) -> Scheme | None:
    """How a layer's weight, seen as (inputs, outputs), is stored; None where it stays float."""
    scheme = _integers(plan, layer.weight)
    if scheme is None or not layer.transposed or not isinstance(scheme.granularity, PerChannel):
        return scheme
    return replace(scheme, granularity=PerChannel(1 - scheme.granularity.axis % 2))


def smoothing_factors(magnitudes: Doubles, weights: Sequence[NDArray[Any]], alpha: float) -> Doubles:
    """max|X|^alpha / max|W|^(1 - alpha) for each channel, W being all layers together."""
    rows = np.max([np.abs(weight).max(axis=1) for weight in weights], axis=0).astype(np.float64)
    return np.asarray(_above_zero(magnitudes) ** alpha / _above_zero(rows) ** (1 - alpha))


def choose_factors(
    group: Group,
    seen: ChannelsSeen,
    stored: Sequence[Scheme | None],
    maker: Maker | None,
    alphas: Sequence[float],
) -> SmoothChoice:
    """The candidate with the smallest error, layers counting alike; none where it does not fall.

    Args:
        group: the layers.
        seen: ranges, and rows that the ranges have not seen.
        stored: how tensor and weights will be quantized; None for what stays float.
        maker: the layer that would take the factors; what rounding does to it counts, too.
        alphas: candidates.
    """
    weights = [layer.operand for layer in group.layers]
    targets = [seen.rows @ weight for weight in weights]
    sizes = [_size(target) for target in targets]

    def errors(factors: Doubles) -> tuple[float, ...]:
        data = np.asarray(seen.rows / factors, np.float32)
        if stored[0] is not None:
            low, high = (seen.low / factors).min(), (seen.high / factors).max()
            data = fake_quantize(data, params_from_range(low, high, stored[0]))
        found = []
        for weight, scheme, target, size in zip(weights, stored[1:], targets, sizes, strict=True):
            scaled = _as_stored(weight * factors[:, None], scheme)
            found.append(_square(data @ scaled - target) / size)
        return tuple(found)

    def cost(factors: Doubles, found: tuple[float, ...]) -> float:
        return sum(found) + (0.0 if maker is None else maker.error(factors))

    plain = np.ones(group.channels)
    before = errors(plain)
    best, least = SmoothChoice(None, plain, before, before), cost(plain, before)
    for alpha in alphas:
        factors = smoothing_factors(seen.magnitudes, weights, alpha)
        found = errors(factors)
        if (total := cost(factors, found)) < least:
            best, least = SmoothChoice(alpha, factors, before, found), total
    return best


def _as_stored(weight: NDArray[Any], scheme: Scheme | None) -> NDArray[Any]:
    """A weight as it is read back; in float where there is no scheme."""
    weight = weight.astype(np.float32)
    if scheme is None:
        return weight
    return fake_quantize(weight, weight_params(weight, scheme), narrow=scheme.symmetric)


def _size(array: NDArray[Any]) -> float:
    return _square(array) or 1.0


def _square(array: NDArray[Any]) -> float:
    return float(np.vdot(array, array))


def _integers(plan: QuantPlan, name: str) -> Scheme | None:
    tensor = plan.tensors.get(name)
    return tensor.scheme if tensor is not None and isinstance(tensor.scheme, Scheme) else None


def _above_zero(values: Doubles) -> Doubles:
    largest = float(values.max(initial=0.0)) or 1.0
    return np.maximum(values, largest * _SMALLEST)


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


@one_blas_thread()
def smooth(
    model: ir.Model,
    groups: tuple[Group, ...],
    seen: Mapping[str, ChannelsSeen],
    plan: QuantPlan,
    recipe: Recipe,
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
        if stored[0] is None or (edits is None and not options.insert):
            where = "others see the tensor, too" if group.shared else "nothing above can take the factors"
            where = "the tensor is not stored in integers" if stored[0] is None else where
            reports.append(SmoothReport(group.name, (), False, None, where))
            continue
        start = time.perf_counter()
        choice = choose_factors(group, seen[group.name], stored, _maker(edits, seen, plan), alphas)
        if choice.alpha is not None:
            _apply(editor, group, choice, edits)
        reports.append(_told(group, choice, edits, time.perf_counter() - start))
    return tuple(reversed(reports))


def _maker(edits: Edits | None, seen: Mapping[str, ChannelsSeen], plan: QuantPlan) -> Maker | None:
    """The quantized layer among the places that take the factors."""
    for edit in edits or ():
        layer, given = read_linear(edit.node), edit.node.inputs[0]
        scheme = None if layer is None else weight_scheme(layer, plan)
        data = None if given is None else seen.get(str(given.name))
        if layer is not None and scheme is not None and data is not None and edit.index == 1:
            return Maker(layer.operand, edit.channels.reshape(-1), scheme, data.rows)
    return None


def _apply(editor: Editor, group: Group, choice: SmoothChoice, edits: Edits | None) -> None:
    if edits is None:
        readers = [(layer.node, 0) for layer in group.layers]
        inverse = (1 / choice.factors).astype(group.layers[0].operand.dtype)
        editor.insert_after(group.value, "Mul", inverse, readers=readers, outputs=False)
    else:
        for edit in edits:
            edit.apply(editor, choice.factors)
    for layer in group.layers:
        layer.set_operand(editor, layer.operand.astype(np.float64) * choice.factors[:, None])


def _told(group: Group, choice: SmoothChoice, edits: Edits | None, seconds: float) -> SmoothReport:
    kept = choice.alpha is not None
    if not kept:
        where = "the error of the layers does not fall"
    elif edits is None:
        where = "a Mul in front of the layers"
    else:
        where = "folded into " + " and ".join(dict.fromkeys(edit.node.op_type for edit in reversed(edits)))
    share = seconds / len(group.layers)
    layers = tuple(
        LayerReport(layer.name, layer.op, decibels(1.0, old), decibels(1.0, new), kept, share)
        for layer, old, new in zip(group.layers, choice.before, choice.after, strict=True)
    )
    return SmoothReport(group.name, layers, kept, choice.alpha, where)
