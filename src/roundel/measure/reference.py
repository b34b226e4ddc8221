"""The float graph that a quantized model is measured against: the model as given, in the other one's terms.

A model that Roundel wrote was prepared, and perhaps equalized, before it was quantized. Both steps are exact
and repeatable: done again, they give a float partner to every tensor of the quantized graph. For models of
other tools, constants are computed, and batch norms folded where the tool has done so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from pydantic import ValidationError

from roundel.improve.channel_rules import Trace
from roundel.improve.channels import channel_layer
from roundel.improve.equalize import equalize
from roundel.measure.match import Matches
from roundel.model.graph import constant_array, values_by_name
from roundel.model.structure import ModelSource
from roundel.qdq.read import StoredTensors
from roundel.recipe.settings import Prepare, Recipe
from roundel.stages import prepare as load_prepared
from roundel.types import Doubles

Arrays = Mapping[tuple[str, int], NDArray[Any]]

_EXPLAINED = 0.1  # of a weight's power may be rounding; what was rescaled besides differs by more

# Only what every tool does: each pass less is a name of the float model more.
_FOREIGN = Prepare(
    fuse_instance_norm=False,
    fuse_layer_norm=False,
    fuse_gelu=False,
    fuse_l2_norm=False,
    fold_pad=False,
    decompose_hard_swish=False,
    unshare_biases=False,
    explicit_conv_attributes=False,
)


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """The float side of a comparison.

    Attributes:
        model: float, computing what the model as given computes.
        plain: constants by node and input index, before equalization.
        file_bytes: size of the file it came from.
        explained: whether its weights are the quantized model's but for rounding, not rescaled any further.
    """

    model: ir.Model
    plain: Arrays
    file_bytes: int | None
    explained: bool


def find_reference(
    source: ModelSource, quantized: ir.Model, stored: StoredTensors, file: Path | None
) -> Reference:
    """Prepare the float model as the quantized one was.

    Args:
        source: the float model as given.
        quantized: the quantized model, stripped of its Q/DQ pairs: its weights decide.
        stored: what the pairs held.
        file: where it was read from; the record beside it tells the recipe.
    """
    ours = quantized.producer_name == "roundel"
    recipe = _recorded(file) if ours and file is not None else None
    if recipe is None:
        recipe = Recipe() if ours else Recipe(prepare=_foreign(quantized))
    ready = load_prepared(source, recipe)
    plain, wanted = layer_constants(ready.model), layer_constants(quantized)
    model, distances = ready.model, _distances(plain, wanted)
    if ours and recipe.improve.equalize.enabled and recipe.mode == "static":
        rescaled = ready.model.clone()
        weights = [t for t in stored.tensors.values() if t.constant and t.dtype != "int32"]
        power_of_two = bool(weights) and all(t.power_of_two for t in weights)
        equalize(rescaled, recipe.improve.equalize, power_of_two=power_of_two)
        # Whether it was equalized, and as this version does it, shows in the weights.
        others = _distances(layer_constants(rescaled), wanted)
        if sum(others.values()) < sum(distances.values()):
            model, distances = rescaled, others
    layers = [key for key, array in wanted.items() if array.ndim > 1]
    explained = all(distances.get(key, 1.0) < _EXPLAINED for key in layers)
    return Reference(model, plain, ready.loaded.file_bytes, explained)


def _foreign(quantized: ir.Model) -> Prepare:
    """Another tool's model: batch norms are folded where it has none left."""
    kept = any(node.op_type == "BatchNormalization" for node in quantized.graph)
    return _FOREIGN.model_copy(update={"fold_batch_norm": not kept})


def layer_constants(model: ir.Model) -> dict[tuple[str, int], NDArray[Any]]:
    """Float constants that nodes read, by node name and input index."""
    found = {}
    for node in model.graph:
        for index, value in enumerate(node.inputs):
            array = constant_array(value)
            if array is not None and array.dtype.kind == "f" and array.size:
                found[str(node.name), index] = array
    return found


def _recorded(file: Path) -> Recipe | None:
    """The recipe in the record beside a model, if there is one that this version understands."""
    record = file.with_suffix(".json")
    if not record.is_file():
        return None
    try:
        return Recipe.model_validate(json.loads(record.read_text(encoding="utf-8"))["recipe"])
    except (ValueError, KeyError, TypeError, ValidationError):
        return None  # another file of that name, or of another version: the weights decide


def _distances(one: Arrays, other: Arrays) -> dict[tuple[str, int], float]:
    """Squared differences relative to the values, of each constant that both have."""
    found = {}
    for key, array in one.items():
        partner = other.get(key)
        if partner is not None and partner.shape == array.shape and array.size > 1:
            power = float(np.square(partner, dtype=np.float64).sum())
            gap = float(np.square(array - partner, dtype=np.float64).sum())
            found[key] = gap / power if power else 0.0
    return found


_FEWEST = 4  # weights in a row; fewer are fitted by chance
_GAIN_DB = 10.0  # rounding alone gains less than 2 dB from one factor for each row
_GOOD_DB = 15.0
_BY_ROW, _BY_COLUMN = (2, 3), (1, 3)


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """What the channels of a float tensor are multiplied by.

    Attributes:
        axis: of the channels.
        values: one for each channel.
    """

    axis: int
    values: NDArray[np.float32]

    def apply(self, array: NDArray[Any]) -> NDArray[Any]:
        """The tensor as the quantized model has it."""
        shape = [1] * array.ndim
        shape[self.axis] = -1
        return np.asarray(array * self.values.reshape(shape))


def find_factors(
    stripped: ir.Model, matches: Matches
) -> tuple[dict[str, Factors], dict[str, tuple[Doubles, Doubles]]]:
    """Factors of tensors and layers of the float graph.

    The quantized graph is the one that was equalized: where its tool has put a Relu in place of a Clip,
    channels are free that the float graph would hold.

    Args:
        stripped: the quantized model without Q/DQ pairs, shapes known: its weights are the stored ones.
        matches: partners of its tensors and nodes.

    Returns:
        Factors by tensor name; and (rows, columns) by node name, for layers that were rescaled.
    """
    trace = Trace(stripped.graph, absorb=False)
    settled = trace.channels.settle()
    factors, known = np.ones(len(settled.roots)), settled.fixed.copy()
    layers: dict[str, tuple[Doubles, Doubles]] = {}
    tensors: dict[str, Factors] = {}
    for layer, (given, made) in zip(trace.layers, trace.sides, strict=True):
        node = matches.nodes.get(str(layer.node.name))
        plain = None if node is None else channel_layer(node)
        if node is None or plain is None or plain.weight.shape != layer.weight.shape:
            continue
        if given is not None:
            columns = factors[settled.roots[given]]
        else:  # behind a norm, which may have taken the factors: smoothing
            columns = 1 / _fit(plain.weight, layer.weight, _BY_COLUMN)
            source = matches.tensors.get(str(layer.node.inputs[0].name)) if layer.node.inputs[0] else None
            if source is not None and np.any(columns != 1):
                tensors[str(source.name)] = Factors(layer.data_axis, columns.astype(np.float32))
        groups, _, inputs, _ = layer.weight.shape
        stored = layer.weight * columns.reshape(groups, 1, inputs, 1)
        roots = settled.roots[made]
        rows = np.where(known[roots], factors[roots], _fit(plain.weight, stored, _BY_ROW))
        factors[roots], known[roots] = rows, True
        if np.any(rows != 1) or np.any(columns != 1):
            layers[str(node.name)] = rows, columns
    for name, value in values_by_name(stripped.graph).items():
        ours, flow = matches.tensors.get(name), trace.flow(value)
        if ours is not None and flow.ids is not None and np.any(factors[settled.roots[flow.ids]] != 1):
            tensors[str(ours.name)] = Factors(flow.axis, factors[settled.roots[flow.ids]].astype(np.float32))
    return tensors, layers


def _fit(plain: NDArray[Any], stored: NDArray[Any], summed: tuple[int, int]) -> Doubles:
    """The factor of each row, or of each column; ones where the layer was not rescaled.

    Args:
        plain: float weights, (groups, outputs, inputs, kernel).
        stored: stored weights, likewise.
        summed: the axes that share a factor.
    """
    a, b = plain.astype(np.float64), stored.astype(np.float64)
    power = np.square(a).sum(axis=summed, keepdims=True)
    one = np.ones(power.size)
    if a.size < _FEWEST * power.size:
        return one
    live = power > 0
    factors = np.where(live, (a * b).sum(axis=summed, keepdims=True) / np.where(live, power, 1), 1.0)
    factors = np.where(factors > 0, factors, 1.0)  # a row of zeros, or nonsense: not a factor
    before, after = np.square(b - a).sum(), np.square(b - a * factors).sum()
    signal = np.square(b).sum()
    explained = after == 0 or 10 * np.log10(signal / after) >= _GOOD_DB
    if before == 0 or not explained or (after > 0 and 10 * np.log10(before / after) < _GAIN_DB):
        return one
    return np.asarray(factors.reshape(-1))
