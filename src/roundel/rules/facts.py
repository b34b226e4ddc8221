"""What the rules ask about: one model under one format on one device, and what `quantize --device` mends."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace

import onnx_ir as ir

from roundel.model import LoadedModel, load_model
from roundel.model.graph import op_key
from roundel.model.load import as_written
from roundel.model.structure import ModelSource
from roundel.options import DEFAULT_PRESET
from roundel.passes import refresh_shapes
from roundel.passes.activations import rescalable_behind
from roundel.passes.cleanup import lift_constants
from roundel.plan import build_plan
from roundel.plan.adjust import on_grid, saturates, upper_bound, will_saturate
from roundel.plan.types import Observed, QuantPlan, Shared
from roundel.qdq.nodes import QUARK
from roundel.qdq.read import StoredTensors, strip_pairs
from roundel.recipe.load import RecipeSource
from roundel.recipe.settings import Recipe
from roundel.rules.formats import Recognised, format_of, intended, is_quantized, recipe_for
from roundel.rules.patterns import close_batch, conv_before, is_depthwise
from roundel.rules.placement import Situation, predict
from roundel.rules.types import Prediction
from roundel.stages import prepare
from roundel.targets.npu import Compiler, Device, Format
from roundel.targets.operators import Trait, ops_with
from roundel.targets.shifts import FAMILIES
from roundel.types import ScaleKind, Scheme

_TOUCHED = frozenset({Format.XINT8, Format.A8W8})
_NEVER_LARGER = ops_with(Trait.SHAPES | Trait.REARRANGES | Trait.SELECTS | Trait.POOL)


@dataclass(frozen=True, slots=True)
class Legaliser:
    """Says which Clips become Relu, for one format on one device.

    Attributes:
        format: the number format.
        device: the device.
        plan: of a float model, None for a finished one.
        stored: of a finished model, None for a float one.
        recipe: what the user switched off stays off.
    """

    format: Format
    device: Device
    recipe: Recipe
    plan: QuantPlan | None
    stored: StoredTensors | None

    def becomes_relu(self, node: ir.Node) -> bool:
        """Whether the Clip is replaced by a Relu, because the quantizer saturates at its bound.

        A depthwise Conv keeps its Clip in XINT8: AMD's logs have that pair on the NPU, and the pair of
        depthwise Conv and Relu on the CPU.
        """
        bound = upper_bound(node)
        if bound is None or self.format not in _TOUCHED or self.device.compiler is not Compiler.X2:
            return False
        if not self._allowed("npu", "clip_to_relu"):
            return False
        conv = conv_before(node)
        if conv is not None and is_depthwise(conv) and self.format is Format.XINT8:
            return False
        if self.plan is not None:
            return self._will(self.plan, node, bound)
        return self._does(node, bound)

    def _will(self, plan: QuantPlan, node: ir.Node, bound: float) -> bool:
        if will_saturate(plan, node):
            return True
        tensor = plan.tensors.get(str(node.outputs[0].name))
        if tensor is None or not isinstance(tensor.source, Observed | Shared):
            return False
        if not _held_below(node.outputs[0]).issuperset(plan.leaders(tensor.name)):
            return False
        if isinstance(tensor.scheme, Scheme) and tensor.scheme.scale is ScaleKind.FLOAT:
            return True
        scaled = self._allowed("prepare", "scale_clip_bounds") and bool(rescalable_behind(node))
        return scaled or on_grid(bound, tensor.scheme)

    def _allowed(self, section: str, name: str) -> bool:
        return bool(self.recipe.own.get(section, {}).get(name, True))

    def _does(self, node: ir.Node, bound: float) -> bool:
        tensors = self.stored.tensors if self.stored is not None else {}
        stored = tensors.get(str(node.outputs[0].name))
        params = None if stored is None else stored.params
        return params is not None and saturates(params, bound)


def _held_below(value: ir.Value) -> set[str]:
    """The tensor and those made from it that hold nothing larger: one scale for them keeps the bound."""
    found: set[str] = set()
    stack = [value]
    while stack:
        current = stack.pop()
        found.add(str(current.name))
        stack.extend(
            out for node in current.consumers() if op_key(node) in _NEVER_LARGER for out in node.outputs
        )
    return found


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
    def graph(self) -> ir.Graph:
        """The user's, in float."""
        return self.given.graph

    @property
    def powers(self) -> bool:
        """Whether every scale must be a power of two."""
        return self.format is Format.XINT8

    @property
    def limits(self) -> frozenset[str]:
        """The families of shift limits that must hold."""
        return FAMILIES if self.powers else frozenset()

    @property
    def computed(self) -> list[ir.Node]:
        """The nodes whose shift limits must hold."""
        return list(self.graph)

    @property
    def float_model(self) -> bool:
        """Whether the model is still to be quantized, so that `quantize` can mend it."""
        return self.stored is None


def gather_facts(source: ModelSource, preset: RecipeSource | None, device: Device) -> Facts:
    """Read a model, float or quantized, and predict its split."""
    loaded = load_model(source, allow_quantized=True, opaque=QUARK)
    raw = as_written(source)
    given = loaded.model
    lift_constants(given)
    stored = strip_pairs(given) if is_quantized(given) else None
    refresh_shapes(given)
    recognised = None if stored is None else intended(stored)
    recipe = recipe_for(_chosen(preset, recognised))
    kind = format_of(recipe)
    prepared, plan = _prepare(source, given, recipe, kind, finished=stored is not None)
    close_batch(prepared)
    legaliser = Legaliser(kind, device, recipe, plan, stored)
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
    model = prepare(source, plain).model
    return model, build_plan(model, plain) if kind.integer else None


def _held(kind: Format, plan: QuantPlan | None, stored: StoredTensors | None) -> Container[str] | None:
    if not kind.integer:
        return None
    if stored is not None:
        return stored.tensors.keys()
    return plan.tensors.keys() if plan is not None else frozenset()
