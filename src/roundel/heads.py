"""Models in two parts: what the NPU runs, up to the last layers, and the float tail that the CPU runs.

A head turns the last layers' results into boxes and scores with Reshape, Transpose and Concat. Phoenix drops
every Conv of a graph that keeps such a tail; cut off, all of the rest is placed. The tail lies beside the
model as NAME.tail.onnx, and the model's record names it; whoever measures the model runs both as one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from roundel.errors import ModelError
from roundel.model import LoadedModel, ModelSource, load_model
from roundel.model.graph import (
    around,
    attribute_string,
    bodies,
    downstream,
    is_constant,
    iter_values,
    opset_version,
)
from roundel.model.normalise import raise_opset
from roundel.model.session import open_session
from roundel.plan.float_parts import tail_of
from roundel.recipe.load import read_record
from roundel.types import Array, Sample

# What makes a way to the output part of a head, wherever on that way it stands.
_REARRANGES = frozenset(
    {"Reshape", "Transpose", "Concat", "Squeeze", "Unsqueeze", "Split", "Softmax", "NonMaxSuppression"}
)
# What the NPU does in one go with the layer before it, or as well as the CPU.
_STAYS = frozenset(
    {"Relu", "Clip", "LeakyRelu", "MaxPool", "AveragePool", "GlobalAveragePool", "Flatten", "DepthToSpace"}
)


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A model in two parts.

    Attributes:
        model: up to the last layers; its outputs are the tail's inputs.
        tail: in float; its outputs are those of the model as it was, by name and order. One that the first
            part makes goes through as it is.
    """

    model: ir.Model
    tail: ir.Model


def cut_head(model: ir.Model) -> Cut | None:
    """The model in two parts; None where nothing behind its last layers is worth a cut.

    Args:
        model: a float model with current shapes; it is not changed.
    """
    graph = model.graph
    behind = head_nodes(graph)
    if not behind or _inputs_of_tail_alone(graph, behind):
        return None
    border = list(dict.fromkeys(value for node in graph if node in behind for value in _read(node, behind)))
    through = [value for value in graph.outputs if value.producer() not in behind]
    made = list(dict.fromkeys([*(value for value in border if not value.is_graph_input()), *through]))
    ends = [value for value in graph.outputs if value.producer() in behind]
    first = _part(model, graph.inputs, made)
    tail = _part(model, list(dict.fromkeys([*border, *through])), ends)
    inside = {str(value.name): value for value in (*tail.graph.inputs, *tail.graph.outputs)}
    tail.graph.outputs[:] = [inside[str(value.name)] for value in graph.outputs]
    return Cut(first, tail)


NO_HEAD = (
    "cut_head: nothing was cut off: nothing behind the last layers rearranges what they make, or an input of"
    " the model is read there alone"
)


def cut_note(cut: Cut) -> str:
    """What the user is told."""
    count = len(cut.tail.graph)
    return f"the head was cut off: {count} nodes behind the last layers run in float, on the CPU, as the tail"


def head_nodes(graph: ir.Graph) -> set[ir.Node]:
    """The nodes behind the last layers on each way to an output that rearranges what they made."""
    tail = set(tail_of(graph))
    if len(tail) == len(graph):
        return set()
    for node in graph:  # in order: a pool behind a Relu stays, too
        if node in tail and _stays(node) and not any(maker in tail for maker in node.predecessors()):
            tail.remove(node)
    left, found = set(tail), set[ir.Node]()
    while left:
        part = around(graph, [next(iter(left))], left)
        left -= part
        ops = {node.op_type for node in part}
        if ops & _REARRANGES or ops == {"Sigmoid"}:
            found |= part
    return found & downstream(graph, (node for node in graph if node not in tail))


def _stays(node: ir.Node) -> bool:
    nearest = node.op_type == "Resize" and attribute_string(node, "mode", "nearest") == "nearest"
    return node.op_type in _STAYS or nearest


def _read(node: ir.Node, behind: Collection[ir.Node]) -> Iterator[ir.Value]:
    """What a node of the tail, or a body in it, reads of the first part."""
    inner = (each for body in bodies(node) for each in body.all_nodes())
    for reader in (node, *inner):
        for value in reader.inputs:
            if value is None or is_constant(value) or value.graph is not node.graph:
                continue
            if value.producer() not in behind:
                yield value


def _inputs_of_tail_alone(graph: ir.Graph, behind: Collection[ir.Node]) -> bool:
    """Whether an input is the tail's alone: data for the model would not fit its first part."""
    before = [node for node in graph if node not in behind]
    used = {value for node in before for value in _read(node, ())}
    return any(value not in used for value in graph.inputs)


def _part(model: ir.Model, inputs: Collection[ir.Value], outputs: Collection[ir.Value]) -> ir.Model:
    graph = ir.convenience.extract(model.graph, list(inputs), list(outputs))
    # It takes constants out of a set: in the model's order, the same run writes the same file.
    held = dict(graph.initializers)
    graph.initializers.clear()
    graph.initializers.update({name: held[name] for name in model.graph.initializers if name in held})
    for value in graph.outputs:
        value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
    return ir.Model(graph, ir_version=model.ir_version)


def joined(model: ir.Model, tail: ir.Model) -> ir.Model:
    """Both parts as one model, with the names of each; neither is changed.

    Raises:
        ModelError: they are not parts of one model.
    """
    whole, rest = model.clone(), tail.clone()
    raise_opset(rest, opset_version(whole))
    made = {str(value.name): value for value in (*whole.graph.inputs, *whole.graph.outputs)}
    wanted = {str(value.name): value for value in rest.graph.inputs}
    if not wanted.keys() <= made.keys():
        lacking = sorted(wanted.keys() - made.keys())
        raise ModelError(
            "The model does not make what its tail reads.",
            observed=f"no output {', '.join(lacking)}",
            expected="a model and the tail that was cut from it",
            hint="Quantize again: both are written together.",
        )
    ends = [made.get(str(value.name), value) for value in rest.graph.outputs]
    _rename_apart(rest.graph, whole.graph)
    rest.graph.outputs.clear()
    for name, value in wanted.items():
        ir.convenience.replace_all_uses_with(value, made[name])
    nodes = list(rest.graph)
    rest.graph.remove(nodes)
    for value in list(rest.graph.initializers.values()):
        rest.graph.initializers.pop(str(value.name))
        whole.graph.register_initializer(value)
    whole.graph.outputs.clear()
    whole.graph.extend(nodes)
    whole.graph.outputs.extend(ends)
    for domain, version in rest.graph.opset_imports.items():
        whole.graph.opset_imports.setdefault(domain, version)
    return whole


def tail_outputs(tail: ir.Model, made: Sample) -> dict[str, Array]:
    """What a tail makes of the inputs and outputs of the model before it."""
    session = open_session(tail)
    names = [out.name for out in session.get_outputs()]
    feed = {each.name: made[each.name] for each in session.get_inputs()}
    return dict(zip(names, session.run(names, feed), strict=True))


def _rename_apart(graph: ir.Graph, other: ir.Graph) -> None:
    """Give other names to what is called alike in both: constants that both parts read."""
    taken = {str(value.name) for value in iter_values(other)}
    kept = {id(value) for value in (*graph.inputs, *graph.outputs)}
    for value in [value for value in iter_values(graph) if value.name in taken and id(value) not in kept]:
        value.name = f"{value.name}_of_tail"
    named = {str(node.name) for node in other}
    for node in graph:
        if node.name in named:
            node.name = f"{node.name}_of_tail"


def tail_file(model: Path | None) -> Path | None:
    """The tail that belongs to a model's file, as the record beside it says; None where none was cut off.

    Raises:
        ModelError: the record names one, and it is not there.
    """
    record = read_record(model)
    told = None if record is None else record.get("file")
    entry = told.get("tail") if isinstance(told, dict) else None
    name = entry.get("name") if isinstance(entry, dict) else None
    if model is None or not isinstance(name, str) or Path(name).name != name:
        return None
    file = model.with_name(name)
    if not file.is_file():
        raise ModelError(
            "The model's tail is missing: its head was cut off, and without the tail it gives other outputs.",
            where=file,
            hint="Keep the model, its record and its tail in one folder.",
        )
    return file


def load_whole(source: ModelSource, *, opaque: str | None = None) -> tuple[LoadedModel, ir.Model | None]:
    """A finished model as one graph, its tail with it if it has one; and the tail alone."""
    loaded = load_model(source, allow_quantized=True, opaque=opaque)
    file = tail_file(loaded.path)
    if file is None:
        return loaded, None
    tail = load_model(file, allow_quantized=True).model
    return replace(loaded, model=joined(loaded.model, tail)), tail
