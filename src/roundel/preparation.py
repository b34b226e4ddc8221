"""From any source to a float model that is ready to be planned."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from roundel.data.lint_values import FirstNorm, first_norms
from roundel.model import LoadedModel, load_model
from roundel.model.load import ModelSource
from roundel.model.normalise import raise_opset
from roundel.passes import PassReport, prepare
from roundel.recipe.settings import Recipe


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A model that is ready to be planned."""

    loaded: LoadedModel
    model: ir.Model
    reports: tuple[PassReport, ...]
    notes: tuple[str, ...]
    norms: tuple[FirstNorm, ...] = ()  # of the model as it was: they tell what the data was like in training


def load_prepared(source: ModelSource, recipe: Recipe) -> Prepared:
    """Load a float model and run the passes that the recipe asks for."""
    loaded = load_model(source)
    notes = list(loaded.notes)
    if recipe.wanted_opset is not None:
        notes += raise_opset(loaded.model, recipe.wanted_opset)
    norms = first_norms(loaded.model.graph)
    reports = prepare(loaded.model, recipe.prepare)
    return Prepared(loaded, loaded.model, reports, tuple(notes), norms)
