"""All that the rules may ask about one model, gathered once."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import onnx_ir as ir

from roundel.check.formats import format_of, recipe_for
from roundel.check.legalise import Legaliser
from roundel.check.macs import close_batch
from roundel.check.number_format import Recognised, intended, is_quantized
from roundel.check.pairs import QUARK
from roundel.check.placement import Situation, predict
from roundel.check.stored import StoredTensors, strip_pairs
from roundel.check.types import Prediction
from roundel.model import LoadedModel, load_model
from roundel.model.load import ModelSource
from roundel.passes import refresh_shapes
from roundel.passes.constants import Constants
from roundel.plan import QuantPlan, build_plan
from roundel.preparation import load_prepared
from roundel.recipe import Recipe
from roundel.recipe_file import RecipeSource
from roundel.targets.devices import Device, Format

DEFAULT_PRESET = "a8w8"


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """One model under one format on one device.

    Attributes:
        raw: the model as the file has it: order, names and inputs untouched.
        loaded: what loading made of it.
        given: the user's graph in float, Q/DQ taken out, with current shapes.
        prepared: the graph that is placed: after the recipe's passes, batch 1.
        recipe: the recipe judged.
        format: the number format judged.
        asked: whether the caller chose the format.
        device: the device.
        plan: of a float model in an integer format.
        stored: of a finished model.
        recognised: the format that a finished model shows.
        legaliser: what `quantize --device` does by itself.
        before: the split as it stands.
        after: the split after legalisation.
    """

    raw: ir.Model
    loaded: LoadedModel
    given: ir.Model
    prepared: ir.Model
    recipe: Recipe
    format: Format
    asked: bool
    device: Device
    plan: QuantPlan | None
    stored: StoredTensors | None
    recognised: Recognised | None
    legaliser: Legaliser
    before: Prediction
    after: Prediction

    @property
    def float_model(self) -> bool:
        """Whether the model is still to be quantized, so that `quantize` can mend it."""
        return self.stored is None


def gather(source: ModelSource, preset: RecipeSource | None, device: Device) -> Facts:
    """Read a model, float or quantized, and predict its split."""
    loaded = load_model(source, allow_quantized=True, opaque=QUARK)
    raw = _read_raw(source)
    given = loaded.model
    Constants()(given)
    stored = strip_pairs(given) if is_quantized(given) else None
    refresh_shapes(given)
    recognised = None if stored is None else intended(stored)
    recipe = recipe_for(_chosen(preset, recognised))
    kind = format_of(recipe)
    prepared, plan = _prepare(source, given, recipe, kind, finished=stored is not None)
    close_batch(prepared)
    legaliser = Legaliser(kind, device, plan, stored)
    situation = Situation(kind, device, _held(kind, plan, stored))
    before = predict(prepared.graph, situation)
    relus = frozenset(str(n.name) for n in prepared.graph if legaliser.becomes_relu(n))
    after = predict(prepared.graph, replace(situation, relus=relus)) if relus else before
    return Facts(
        raw=raw,
        loaded=loaded,
        given=given,
        prepared=prepared,
        recipe=recipe,
        format=kind,
        asked=preset is not None,
        device=device,
        plan=plan,
        stored=stored,
        recognised=recognised,
        legaliser=legaliser,
        before=before,
        after=after,
    )


def _chosen(preset: RecipeSource | None, recognised: Recognised | None) -> RecipeSource:
    if preset is not None:
        return preset
    return DEFAULT_PRESET if recognised is None else recognised.format.value


def _prepare(
    source: ModelSource, given: ir.Model, recipe: Recipe, kind: Format, *, finished: bool
) -> tuple[ir.Model, QuantPlan | None]:
    """The graph to place, and the plan of a float one. Finished models are placed as they are."""
    if finished:
        return given.clone(), None
    # What the device's own steps change is judged apart, so they stay out of the first view.
    plain = recipe.merged({"prepare": {"scale_clip_bounds": False}, "npu": {"clip_to_relu": False}})
    model = load_prepared(source, plain).model
    return model, build_plan(model, plain) if kind.integer else None


def _held(kind: Format, plan: QuantPlan | None, stored: StoredTensors | None) -> Container[str] | None:
    if not kind.integer:
        return None
    if stored is not None:
        return stored.tensors.keys()
    return plan.tensors.keys() if plan is not None else frozenset()


def _read_raw(source: ModelSource) -> ir.Model:
    """The model untouched; `load_model` has already proved it readable."""
    if isinstance(source, ir.Model):
        return source
    if isinstance(source, onnx.ModelProto):
        return ir.from_proto(source)
    if isinstance(source, bytes):
        return ir.from_proto(onnx.load_from_string(source))
    return ir.load(Path(source).absolute(), format="protobuf")
