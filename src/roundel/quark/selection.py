"""Other treatment for single tensors, in the words that scripts have for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from roundel.errors import did_you_mean
from roundel.model.graph import downstream, upstream
from roundel.model.load import ModelSource, load_model
from roundel.model.normalise import raise_opset
from roundel.passes import prepare
from roundel.plan import build_plan
from roundel.quark.enums import recipe_type
from roundel.quark.errors import QuarkConfigError, go_on
from roundel.quark.qconfig import QConfig, split_excluded
from roundel.quark.request import INTEGERS, Request, block_type
from roundel.quark.specs import Int32, QLayerConfig, QTensorConfig
from roundel.recipe.settings import Recipe
from roundel.targets.operators import operator_set
from roundel.types import QType

_WORDS = (
    *("quant_type", "symmetric", "rmin", "rmax", "scale", "zero_point", "axis", "reduce_range", "convert"),
)


def from_tensor_overrides(given: Mapping[str, Any], request: Request) -> tuple[dict[str, Any], ...]:
    """Recipe overrides for {tensor: [{quant_type, symmetric, rmin, rmax, scale, zero_point, axis}]}.

    Raises:
        QuarkConfigError: an entry has another form, or asks for what a recipe cannot say.
    """
    return tuple(_override(name, entries, request) for name, entries in given.items())


def from_mixed_precision(given: Mapping[Any, Sequence[str]]) -> tuple[dict[str, Any], ...]:
    """Recipe overrides for {type: [tensors]}."""
    where = "extra_options['MixedPrecisionTensor']"
    return tuple(
        {"tensors": tuple(names), "type": recipe_type(kind, where)} for kind, names in given.items() if names
    )


def _override(name: str, entries: Any, request: Request) -> dict[str, Any]:
    where = f"extra_options['TensorQuantOverrides']['{name}']"
    if not isinstance(entries, list | tuple) or not entries or not isinstance(entries[0], Mapping):
        raise QuarkConfigError(
            "An override has another form.", where=where, observed=entries, expected="[{'quant_type': …}]"
        )
    if len(entries) > 1:
        raise QuarkConfigError(
            "An override lists its channels.",
            where=where,
            observed=f"{len(entries)} entries",
            expected="one entry; {'axis': N} gives each channel its own scale",
        )
    entry = entries[0]
    for word in entry:
        if word not in _WORDS:
            raise QuarkConfigError.unknown(f"An override has no '{word}'.", word, sorted(_WORDS), where=where)
    for word, why in (
        ("reduce_range", "one bit less is for all weights: reduce_range=True in the config"),
        ("convert", "a tensor has one type"),
    ):
        if entry.get(word):
            raise QuarkConfigError(f"An override cannot say '{word}'.", where=where, hint=f"{why}.")
    return {"tensors": (name,), **dict(_parts(entry, request, where))}


def _parts(entry: Mapping[str, Any], request: Request, where: str) -> Iterator[tuple[str, Any]]:
    if entry.get("quant_type") is not None:
        yield "type", block_type(recipe_type(entry["quant_type"], where), request.options)
    if entry.get("symmetric") is not None:
        yield "symmetric", bool(entry["symmetric"])
    if entry.get("axis") is not None:
        yield "per_channel", True
    bounds = _bounds(entry, request, where)
    if bounds is not None:
        yield "range", bounds


def _bounds(entry: Mapping[str, Any], request: Request, where: str) -> tuple[float, float] | None:
    """The range that is given, or the one that a given scale and zero point reach."""
    if ("rmin" in entry) != ("rmax" in entry) or ("scale" in entry) != ("zero_point" in entry):
        raise QuarkConfigError(
            "An override gives half of a pair.",
            where=where,
            observed=dict(entry),
            expected="rmin and rmax, or scale and zero_point",
        )
    if "rmin" in entry:
        return float(entry["rmin"]), float(entry["rmax"])
    if "scale" not in entry:
        return None
    word = recipe_type(entry["quant_type"], where) if "quant_type" in entry else request.activation
    kind, scale, zero = QType(word), float(entry["scale"]), int(entry["zero_point"])
    low = kind.qmin + (1 if kind.signed and zero == 0 else 0)
    return (low - zero) * scale, (kind.qmax - zero) * scale


def known_overrides(
    given: Sequence[Mapping[str, Any]], recipe: Recipe, model: ModelSource
) -> tuple[Mapping[str, Any], ...]:
    """The overrides whose tensors the model has and quantizes; the others are warned about.

    Args:
        given: of single tensors, as scripts name them.
        recipe: everything but these.
        model: the float model.
    """
    planned = build_plan(Nodes(model, recipe).model, recipe).tensors
    kept = []
    for entry in given:
        gone = [name for name in entry["tensors"] if name not in planned]
        for name in gone:
            what = f"No tensor '{name}' is quantized: its override does nothing."
            hint = did_you_mean(name, planned)
            go_on(QuarkConfigError(what, where="TensorQuantOverrides, MixedPrecisionTensor", hint=hint))
        names = tuple(name for name in entry["tensors"] if name in planned)
        kept += [{**entry, "tensors": names}] if names else []
    return tuple(kept)


def selected(
    request: Request, layers: QConfig | None, float_outputs: Iterable[str], recipe: Recipe, model: ModelSource
) -> tuple[dict[str, Any], list[str]]:
    """The part of the recipe that names nodes of the model, and notes; empty where nothing is named.

    Args:
        request: the config.
        layers: the newer config, when its layers have specs of their own.
        float_outputs: nodes whose outputs stay float.
        recipe: everything else, which decides how the model is prepared.
        model: the float model.

    Raises:
        QuarkConfigError: a name is of no node of the model.
    """
    config = request.config
    named = (
        *(config.nodes_to_exclude, config.nodes_to_quantize, config.subgraphs_to_exclude),
        *(config.input_nodes, config.output_nodes, config.op_types_to_quantize),
        *(config.extra_op_types_to_quantize, list(float_outputs)),
    )
    special = layers is not None and (layers.specific_layer_config or layers.layer_type_config)
    if not any(named) and not special:
        return {}, []
    nodes = Nodes(model, recipe)
    values = dict(_choice(request, nodes))
    overrides = [nodes.float_outputs(float_outputs)] if float_outputs else []
    if layers is not None and special:
        floats = nodes.types(layers.layer_type_config.get(None, ()))
        present = {node.op_type for node in nodes.model.graph}
        kept = tuple(f"op:{word}" for word in floats if word in present)
        values["selection.exclude"] = (*values.get("selection.exclude", ()), *kept)
        overrides += _layer_overrides(layers, nodes, request, recipe)
    if overrides:
        values["overrides"] = tuple(overrides)
    return values, nodes.notes


def _choice(request: Request, nodes: Nodes) -> Iterator[tuple[str, Any]]:
    config = request.config
    excluded = nodes.find(config.nodes_to_exclude, "nodes_to_exclude")
    excluded += nodes.beyond(config.input_nodes, "input_nodes", upstream)
    excluded += nodes.beyond(config.output_nodes, "output_nodes", downstream)
    if excluded:
        yield "selection.exclude", tuple(dict.fromkeys(excluded))
    if config.nodes_to_quantize:
        included = tuple(nodes.find(config.nodes_to_quantize, "nodes_to_quantize"))
        if not included:  # nothing chosen would mean everything
            raise QuarkConfigError(
                "None of the nodes to quantize is in the model.",
                where="nodes_to_quantize",
                observed=config.nodes_to_quantize[:5],
            )
        yield "selection.include", included
    if config.subgraphs_to_exclude:
        _, pairs = split_excluded(list(config.subgraphs_to_exclude))
        yield "selection.exclude_subgraphs", tuple(nodes.between(pair) for pair in pairs)
    if config.op_types_to_quantize:
        yield "selection.op_types", tuple(nodes.types(config.op_types_to_quantize))
    if config.extra_op_types_to_quantize:
        yield "selection.extra_op_types", tuple(nodes.types(config.extra_op_types_to_quantize))


class Nodes:
    """The nodes of a model as given and as prepared."""

    def __init__(self, model: ModelSource, recipe: Recipe) -> None:
        loaded = load_model(model)
        self.given = {str(node.name): [str(v.name) for v in node.outputs] for node in loaded.model.graph}
        self.given_types = {node.op_type for node in loaded.model.graph}
        if recipe.output.opset is not None:
            raise_opset(loaded.model, recipe.output.opset)
        prepare(loaded.model, recipe.prepare)
        self.model = loaded.model
        self.nodes = {str(node.name): node for node in self.model.graph}
        self.makers = {str(v.name): str(node.name) for node in self.model.graph for v in node.outputs}
        self.notes: list[str] = []

    def find(self, words: Iterable[str], option: str) -> list[str]:
        """Names of prepared nodes; a node that was rewritten is found by the tensor that it made."""
        found: list[str] = []
        for word in words:
            if word.startswith("^"):
                found.append(f"re:{word}")
            else:
                found += self._one(word, option)
        return found

    def _one(self, word: str, option: str) -> list[str]:
        if word in self.nodes:
            return [word]
        made = self.given.get(word, [word])
        makers = list(dict.fromkeys(self.makers[name] for name in made if name in self.makers))
        if makers:
            return makers
        if word in self.given:
            self.notes.append(f"{option}: '{word}' is not there any more after preparation")
            return []
        hint = did_you_mean(word, [*self.given, *self.makers])
        missing = QuarkConfigError(f"The model has no node '{word}'.", where=option, hint=hint)
        if option == "subgraphs_to_exclude":  # a border that is not there makes another subgraph
            raise missing
        go_on(missing)
        return []

    def between(self, pair: Any) -> dict[str, tuple[str, ...]]:
        """A subgraph from its first to its last nodes."""
        starts, ends = pair
        return {
            "inputs": tuple(self.find(starts, "subgraphs_to_exclude")),
            "outputs": tuple(self.find(ends, "subgraphs_to_exclude")),
        }

    def beyond(
        self, words: Iterable[str], option: str, side: Callable[[ir.Graph, list[ir.Node]], set[ir.Node]]
    ) -> list[str]:
        """What data passes before it reaches these nodes, or after them."""
        border = [self.nodes[name] for name in self.find(words, option)]
        reached = side(self.model.graph, border)
        return [str(node.name) for node in self.model.graph if node in reached and node not in border]

    def types(self, words: Iterable[str]) -> list[str]:
        """Operator types; those that ONNX has and the prepared model has not are left out."""
        known = operator_set("extended").keys()
        present = {node.op_type for node in self.model.graph}
        kept = []
        for word in words:
            gone = word not in known | present
            if gone and (word in self.given_types or onnx.defs.has(word)):
                self.notes.append(f"operator type {word}: the prepared model has none")
            else:
                kept.append(word)
        return kept

    def float_outputs(self, words: Iterable[str]) -> dict[str, Any]:
        """An override that leaves the outputs of these nodes in float."""
        found = self.find(words, "NodesToExcludeOutputQuantization")
        return {"tensors": tuple(str(v.name) for n in found for v in self.nodes[n].outputs), "type": "float"}


def _layer_overrides(
    layers: QConfig, nodes: Nodes, request: Request, recipe: Recipe
) -> Iterator[dict[str, Any]]:
    """Overrides for operator types first, then for single layers, which win."""
    planned = build_plan(nodes.model, recipe).tensors
    for layer, types in layers.layer_type_config.items():
        if layer is not None:
            chosen = [node for node in nodes.model.graph if node.op_type in types]
            yield from _of_nodes(chosen, layer, request, planned)
    for layer, words in layers.specific_layer_config.items():
        names, pairs = split_excluded(list(words))
        selectors = nodes.find(names, "specific_layer_config")
        if pairs:
            raise QuarkConfigError(
                "A layer config takes node names, not subgraphs.",
                where="specific_layer_config",
                observed=pairs[0],
                hint="List the nodes, or use a pattern: '^/encoder/.*'.",
            )
        for selector in selectors:
            pattern = selector.removeprefix("re:") if selector.startswith("re:") else None
            found = [selector] if pattern is None else [n for n in nodes.nodes if re.search(pattern, n)]
            yield from _of_nodes([nodes.nodes[name] for name in found], layer, request, planned)


def _of_nodes(
    chosen: Iterable[ir.Node], layer: QLayerConfig, request: Request, planned: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    for name, spec in (pair for node in chosen for pair in _tensors(node, layer)):
        if name in planned:
            kind = spec.kind
            word = kind.block or block_type(recipe_type(kind.quant_type, str(spec)), request.options)
            symmetry = {"symmetric": spec.symmetric} if word in INTEGERS else {}
            yield {"tensors": (name,), "type": word, **symmetry}


def _tensors(node: ir.Node, layer: QLayerConfig) -> Iterator[tuple[str, QTensorConfig]]:
    """Leading computed inputs, then the weight, then the outputs."""
    if layer.bias is not None and layer.bias.kind is not Int32:
        raise QuarkConfigError(
            "A layer's bias cannot have a type of its own.",
            where="QLayerConfig.bias",
            observed=layer.bias,
            expected="Int32Spec(), or none: it then follows from the types of input and weight",
        )
    inputs = [value for value in node.inputs if value is not None]
    weights = (index for index, value in enumerate(inputs) if value.const_value is not None)
    computed = next(weights, len(inputs))
    parts = [(value, layer.input_tensors) for value in inputs[:computed]]
    parts += [(value, layer.weight) for value in inputs[computed : computed + 1]]
    parts += [(value, layer.output_tensors) for value in node.outputs]
    for value, spec in parts:
        if spec is not None:
            yield str(value.name), spec
