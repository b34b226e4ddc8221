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

from roundel.algorithms.equalize import equalize
from roundel.check.stored import StoredTensors
from roundel.model.graph import constant_array
from roundel.model.load import ModelSource
from roundel.preparation import load_prepared
from roundel.recipe import Prepare, Recipe

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
