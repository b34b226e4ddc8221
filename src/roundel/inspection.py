"""What a model is made of, and what a preset would do with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from roundel.errors import SelectionError, did_you_mean
from roundel.model import load_model
from roundel.model.graph import input_specs, op_key, opset_version
from roundel.model.load import quantized_node
from roundel.model.structure import ModelSource, blaming
from roundel.options import chosen_recipe, fixing, recipe_changes
from roundel.plain import Card, to_plain
from roundel.plan import QuantPlan, build_plan
from roundel.qdq.nodes import QUARK
from roundel.recipe.load import RecipeSource, load_recipe
from roundel.recipe.settings import Recipe
from roundel.report.verdict import npu_words
from roundel.rules.report import finished, placement
from roundel.stages import prepare
from roundel.targets.npu import USUAL_DEVICE


@dataclass(frozen=True, slots=True, repr=False)
class Inspection(Card):
    """A model's outline.

    Attributes:
        operators: count of each operator in the file.
        quantized_by: the preset asked about, or None when the model is quantized already.
        quantized: count of each operator that the preset quantizes, in the prepared graph.
        left: count of each operator that it leaves in float.
        nodes: (name, operator, verdict) of every node.
        npu: where the model, or what the preset makes of it, is expected to run on the usual device.
    """

    name: str
    file_bytes: int
    weight_bytes: int
    opset: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    operators: dict[str, int]
    weight_types: dict[str, int]
    quantized_by: str | None
    quantized: dict[str, int]
    left: dict[str, int]
    nodes: tuple[tuple[str, str, str], ...]
    notes: tuple[str, ...]
    npu: str = ""

    def card(self) -> Mapping[str, object]:
        """Its size, and how much of it would be quantized."""
        quantized = sum(self.quantized.values())
        verdict = f"{self.quantized_by} quantizes {quantized} of {len(self.nodes)}"
        return {
            "model": f"{self.name}, opset {self.opset}, {self.file_bytes / 1e6:.1f} MB",
            "inputs": ", ".join(self.inputs),
            "outputs": ", ".join(self.outputs),
            "nodes": "quantized already" if self.quantized_by is None else verdict,
            "NPU": self.npu,
        }

    def to_dict(self, *, nodes: bool) -> dict[str, Any]:
        """Plain values for JSON."""
        tree: dict[str, Any] = to_plain(self)
        del tree["nodes"]
        if nodes:
            tree["nodes"] = [dict(zip(("name", "op", "verdict"), node, strict=True)) for node in self.nodes]
        return tree


def inspect(
    model: str | Path,
    *,
    preset: str | None = None,
    recipe: RecipeSource | None = None,
    fix_inputs: Mapping[str, Any] | None = None,
) -> Inspection:
    """Show a model's inputs, operators, types and sizes, and what a preset would quantize.

    Args:
        model: an ONNX file, float or quantized.
        preset: a preset's name; a8w8 when neither this nor a recipe is given.
        recipe: a recipe file, a mapping or a Recipe.
        fix_inputs: inputs that become constants, as `roundel.quantize` takes them.

    Raises:
        RoundelError: the model cannot be read, or there is no such preset.
    """
    with blaming(model):
        return _inspected(Path(model), load_recipe(chosen_recipe(preset, recipe), fixing({}, fix_inputs)))


def _inspected(path: Path, recipe: Recipe) -> Inspection:
    loaded = load_model(path, allow_quantized=True, opaque=QUARK)
    graph = loaded.model.graph
    operators = dict(Counter(op_key(node) for node in graph).most_common())
    types: Counter[str] = Counter()
    for tensor in _stored(graph):
        types[tensor.dtype.name.lower()] += tensor.nbytes
    done = quantized_node(loaded.model) is not None
    if done:
        quantized, left = dict[str, int](), dict[str, int]()
        nodes = tuple((str(node.name), op_key(node), "") for node in graph)
    else:
        quantized, left, nodes = _verdicts(path, recipe)
    return Inspection(
        name=path.name,
        file_bytes=path.stat().st_size,
        weight_bytes=types.total(),
        opset=opset_version(loaded.model),
        inputs=tuple(str(spec) for spec in input_specs(loaded.model)),
        outputs=tuple(f"{v.name}: {v.dtype} {v.shape}" for v in graph.outputs),
        operators=operators,
        weight_types=dict(types.most_common()),
        quantized_by=None if done else recipe.name,
        quantized=quantized,
        left=left,
        nodes=nodes,
        notes=loaded.notes,
        npu=npu_words(placement(finished(path, None if done else recipe, USUAL_DEVICE), USUAL_DEVICE)),
    )


def _stored(graph: ir.Graph) -> Iterator[ir.TensorProtocol]:
    """Initializers, and what some exporters put into Constant nodes instead."""
    yield from (v.const_value for v in graph.initializers.values() if v.const_value is not None)
    for node in graph:
        if node.op_type == "Constant" and "value" in node.attributes:
            tensor = node.attributes["value"].as_tensor()
            if tensor.dtype is not ir.DataType.STRING:
                yield tensor


def _verdicts(
    path: Path, recipe: Recipe
) -> tuple[dict[str, int], dict[str, int], tuple[tuple[str, str, str], ...]]:
    plan = build_plan(prepare(path, recipe).model, recipe)
    verdicts = plan.nodes.values()
    return (
        dict(Counter(n.op for n in verdicts if n.quantized).most_common()),
        dict(Counter(n.op for n in verdicts if not n.quantized).most_common()),
        tuple((n.name, n.op, n.reason) for n in verdicts),
    )


def explain(
    model: ModelSource,
    *,
    preset: str | None = None,
    recipe: RecipeSource | None = None,
    tensor: str | None = None,
    exclude: Sequence[str] = (),
    include: Sequence[str] = (),
    fix_inputs: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> QuantPlan:
    """What every tensor would become, and why. Needs no data.

    Args:
        model: the float model.
        preset: a preset's name; a8w8 when neither this nor a recipe is given.
        recipe: a recipe file, a mapping or a Recipe.
        tensor: only this one.
        exclude: nodes that stay float, as `roundel.quantize` takes them.
        include: only these are quantized.
        fix_inputs: inputs that become constants, as `roundel.quantize` takes them.
        changes: recipe values that differ from the recipe's own.

    Raises:
        SelectionError: the model has no such tensor.
        RoundelError: the model or the recipe is wrong.
    """
    tree = recipe_changes(fixing(changes, fix_inputs), None, exclude, include)
    chosen = load_recipe(chosen_recipe(preset, recipe), tree)
    plan = build_plan(prepare(model, chosen).model, chosen)
    if tensor is None:
        return plan
    known = [*plan.tensors, *plan.kept_float]
    if tensor not in known:
        raise SelectionError(f"The model has no float tensor '{tensor}'.", hint=did_you_mean(tensor, known))
    return replace(
        plan,
        tensors={name: item for name, item in plan.tensors.items() if name == tensor},
        kept_float={name: why for name, why in plan.kept_float.items() if name == tensor},
    )
