"""What the rules ask about: one model under one format on one device, and what `quantize --device` mends."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import onnx_ir as ir

from roundel.heads import cut_head
from roundel.model import LoadedModel, load_model
from roundel.model.graph import dims, op_key
from roundel.model.load import as_written
from roundel.model.structure import ModelSource
from roundel.options import DEFAULT_PRESET
from roundel.passes import refresh_shapes, settle_branches
from roundel.passes.activations import is_depthwise, rescalable_behind
from roundel.passes.cleanup import lift_constants
from roundel.plan import build_plan
from roundel.plan.adjust import on_grid, saturates, upper_bound, will_saturate
from roundel.plan.types import Observed, QuantPlan, Shared
from roundel.qdq.nodes import QUARK
from roundel.qdq.read import BITS, StoredTensors, strip_pairs
from roundel.recipe.load import RecipeSource
from roundel.recipe.settings import Recipe
from roundel.rules.formats import Recognised, format_of, intended, is_quantized, recipe_for
from roundel.rules.phoenix_places import Refused, count_nodes
from roundel.rules.placement import Situation, close_batch, conv_before, predict
from roundel.rules.types import NodeCounts, Prediction
from roundel.rules.written import Written
from roundel.stages import prepare
from roundel.targets.npu import Compiler, Device, Format
from roundel.targets.operators import Trait, ops_with
from roundel.targets.shifts import FAMILIES
from roundel.types import ScaleKind, Scheme

_TOUCHED = frozenset({Format.XINT8, Format.A8W8})
_BATCHED = ops_with(Trait.CONV | Trait.POOL)
_NEVER_LARGER = ops_with(Trait.SHAPES | Trait.REARRANGES | Trait.SELECTS | Trait.POOL)


_IMAGE_RANK = 4


def fixed_rows(graph: ir.Graph) -> int:
    """The batch that the graph's images have fixed; 1 where it is open."""
    rows = 1
    for value in graph.inputs:
        shape = dims(value) or ()
        imaged = len(shape) == _IMAGE_RANK or any(op_key(node) in _BATCHED for node in value.consumers())
        if value.name not in graph.initializers and imaged and shape:
            rows = max(rows, shape[0] or 1)
    return rows


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


def _off_grid(stored: StoredTensors) -> bool:
    """Whether X1 takes the file for XINT8, with scales off the grid: 8 bits throughout, standard nodes."""
    return all(BITS.get(t.dtype) == 8 and not t.domain for t in stored.tensors.values())


@dataclass(frozen=True, eq=False)
class Facts(Written):
    """One model under one format on one device.

    Attributes:
        graph: the user's, in float, Q/DQ taken out, with current shapes.
        stored: of a finished model, None for a float one.
        raw: the model as the file has it: order, names and inputs untouched.
        whole: a finished model for the first NPU, pairs and names in place; else None.
        loaded: what loading made of it.
        prepared: the graph that is placed: after the recipe's passes, batch 1.
        recipe: the recipe judged; what the user switched off stays off.
        format: the number format judged.
        asked: whether the caller chose the format.
        device: the device.
        plan: of a float model in an integer format.
        recognised: the format that a finished model shows.
    """

    raw: ir.Model
    whole: ir.Model | None
    loaded: LoadedModel
    prepared: ir.Model
    recipe: Recipe
    format: Format
    asked: bool
    device: Device
    plan: QuantPlan | None
    recognised: Recognised | None

    @cached_property
    def counts(self) -> NodeCounts | None:
        """What the provider's report should count; known for finished models on the first NPU."""
        return None if self.whole is None else count_nodes(self.whole.graph, self.before)

    @property
    def first(self) -> bool:
        """Whether a finished integer model is judged for the first NPU, whose faults are silent."""
        return self.stored is not None and self.format.integer and self.device.compiler is Compiler.X1

    @property
    def float_model(self) -> bool:
        """Whether the model is still to be quantized, so that `quantize` can mend it."""
        return self.stored is None

    @cached_property
    def before(self) -> Prediction:
        """The split as it stands."""
        return predict(self.prepared.graph, self._situation)

    @cached_property
    def cut(self) -> Facts | None:
        """The float model without its head, where only so the first NPU takes anything; else None."""
        if self.plan is None or self.device.compiler is not Compiler.X1 or self.before.npu_nodes:
            return None
        parts = cut_head(self.prepared) if self._allowed("prepare", "cut_head") else None
        if parts is None:
            return None
        first = replace(self, prepared=parts.model, plan=build_plan(parts.model, self.recipe))
        return first if first.before.npu_nodes else None

    @cached_property
    def after(self) -> Prediction:
        """The split once `quantize --device` has done what it does by itself."""
        if self.cut is not None:
            return self.cut.before
        relus = frozenset(str(n.name) for n in self.prepared.graph if self.becomes_relu(n))
        return predict(self.prepared.graph, replace(self._situation, relus=relus)) if relus else self.before

    @property
    def _situation(self) -> Situation:
        held: Container[str] = self.tensors.keys() if self.plan is None else self.plan.tensors.keys()
        place = Situation(self.format, self.device, held if self.format.integer else None)
        if self.device.compiler is not Compiler.X1:
            return place
        refused = frozenset(breach.node for breach in self.breaches if breach.rule == "shift_cut")
        return replace(place, whole=self._refused_whole, shifts=refused, batch=fixed_rows(self.graph))

    @property
    def _refused_whole(self) -> Refused | None:
        """What makes the first NPU's compiler refuse a finished graph as a whole."""
        for tensor in self.tensors.values():
            if tensor.domain == "com.microsoft":
                return Refused("Q15", "Q/DQ in the domain com.microsoft")
            if tensor.scale.size > 1:
                return Refused("Q02", f"'{tensor.name}' has {tensor.scale.size} scales")
        return None

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
        stored = self.tensors.get(str(node.outputs[0].name))
        params = None if stored is None else stored.params
        return params is not None and saturates(params, bound)

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


def gather_facts(
    source: ModelSource, preset: RecipeSource | None, device: Device, changes: Mapping[str, Any] | None = None
) -> Facts:
    """Read a model, float or quantized, and prepare it as its format wants; with changes of the recipe."""
    loaded = load_model(source, allow_quantized=True, opaque=QUARK)
    raw = as_written(source)
    given = loaded.model
    lift_constants(given)
    finished, first = is_quantized(given), device.compiler is Compiler.X1
    whole = given.clone() if finished and first else None
    stored = strip_pairs(given) if finished else None
    refresh_shapes(given)
    known = None if stored is None else intended(stored)
    chosen = preset if preset is not None else DEFAULT_PRESET
    if preset is None and known is not None and stored is not None:
        meant = known.format is Format.A8W8 and first and _off_grid(stored)
        chosen = (Format.XINT8 if meant else known.format).value
    recipe = recipe_for(chosen).merged(dict(changes or {}))
    kind, plan = format_of(recipe), None
    if stored is not None:
        prepared = given.clone()  # a finished model is placed as it is
    else:
        settle_branches(given, recipe.prepare)  # what quantize takes away is nothing to complain about
        # What the device's own steps change is judged apart, so they stay out of the first view.
        plain = recipe.merged({"prepare": {"scale_clip_bounds": False}, "npu": {"clip_to_relu": False}})
        prepared = prepare(source, plain).model
        parts = cut_head(given) if recipe.prepare.cut_head else None
        if parts is not None:  # nothing of the tail is the NPU's
            given = parts.model
            loaded = replace(loaded, model=given)
        plan = build_plan(prepared, plain) if kind.integer else None
    close_batch(prepared)
    powers = kind is Format.XINT8
    shifting = powers or (kind.integer and first)
    written = (given.graph, stored, shifting, FAMILIES if powers else frozenset(), tuple(given.graph))
    return Facts(
        *written, raw, whole, loaded, prepared, recipe, kind, preset is not None, device, plan, known
    )
