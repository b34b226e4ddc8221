"""Where Phoenix (compiler X1) runs nodes, measured: single refusals, and what ejects every Conv."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from roundel.model import graph
from roundel.qdq.read import PAIRS
from roundel.rules.types import NodeCounts, Place, Prediction
from roundel.targets.x1 import MOST_DIMENSIONS, X1_ROWS

_ATTENTION = ("MatMul", "Einsum")
_LAST_LINEAR = 8  # a linear Resize by as much stayed on the CPU as the last layer, one by 4 in the middle ran
_INPUT_REDUCTION = 0.25
_STILL_RUN = ("Add", "Relu")  # of a graph with a batch of 2


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a node, or a whole graph, is not taken: the rule's number and the reason."""

    rule: str
    reason: str


def refusal_of(node: ir.Node) -> Refused | None:
    """Why the NPU does not take this node; None where it does, or where nothing is known of its operator."""
    wide = next((value for value in _floats(node) if (graph.rank(value) or 0) > MOST_DIMENSIONS), None)
    if wide is not None:
        return Refused("P23", f"touches the {graph.rank(wide)}-D tensor '{wide.name}'")
    row = X1_ROWS.get(graph.op_key(node))
    if row is not None and not row.runs:
        return Refused("P24", row.seen)
    resized = _resize(node) if graph.op_key(node) == "Resize" else None
    return None if resized is None else Refused("P24", resized)


def _floats(node: ir.Node) -> Iterator[ir.Value]:
    for value in (*node.inputs, *node.outputs):
        if value is not None and value.dtype in graph.FLOAT_TYPES:
            yield value


def _resize(node: ir.Node) -> str | None:
    """Three kinds of linear Resize stayed on the CPU."""
    if graph.attribute_string(node, "mode", "nearest") != "linear":
        return None
    if graph.attribute_string(node, "coordinate_transformation_mode", "half_pixel") == "align_corners":
        return "linear with align_corners"
    before, after = graph.static_shape(node.inputs[0]), graph.static_shape(node.outputs[0])
    if not before or not after or not before[-1]:
        return None
    factor, last = after[-1] / before[-1], node.outputs[0].is_graph_output()
    if last and factor >= _LAST_LINEAR:
        return f"linear by {factor:g}, the last layer"
    source = node.inputs[0]
    if source is not None and source.is_graph_input() and factor <= _INPUT_REDUCTION:
        return f"reduces the input by {1 / factor:g}"
    return None


def with_batch(nodes: Sequence[ir.Node], rows: int) -> dict[ir.Node, Refused | None]:
    """A graph with a fixed batch above 1: only its sums and Relus were taken."""
    taken = Refused("P03", f"a fixed batch of {rows}: layers run on the CPU")
    return {node: None if graph.op_key(node) in _STILL_RUN else taken for node in nodes}


def ejection(nodes: Sequence[ir.Node], in_float: Collection[ir.Node]) -> Refused | None:
    """What makes the provider drop every Conv; None where nothing is known that does.

    Args:
        nodes: of the graph, in topological order.
        in_float: those with a side that is not quantized.
    """
    convs = [node for node in nodes if graph.op_key(node) == "Conv" and node not in in_float]
    if not convs:
        return None
    whole = convs[0].graph
    assert isinstance(whole, ir.Graph)
    behind, before = graph.downstream(whole, convs), graph.upstream(whole, convs)
    tail = [node for node in nodes if node in in_float and node in behind and node not in before]
    joining = [node for node in tail if _joins(node)]
    if joining:
        return Refused(
            "P25", f"{len(tail)} float nodes behind the last Conv join tensors ({_named(joining[0])})"
        )
    inner = [node for node in nodes if node in behind and node in before and node not in convs]
    for node in inner:
        found = _tears(node)
        if found is not None:
            return Refused("P25", found)
    return None


def _tears(node: ir.Node) -> str | None:
    """Why a node between Conv makes the provider drop them."""
    op = graph.op_key(node)
    if op in _ATTENTION and _joins(node):
        return f"attention between Conv ({_named(node)})"
    if op == "InstanceNormalization":
        readers = [graph.op_key(reader) for reader, _ in graph.readers(node.outputs[0])]
        return f"IBNorm between Conv ({_named(node)})" if "Concat" in readers else None
    if op == "Reshape" and (graph.rank(node.outputs[0]) or 0) > MOST_DIMENSIONS:
        shuffled = graph.only_reader(node.outputs[0])
        plain = shuffled is not None and graph.op_key(shuffled) == "Transpose"
        return None if plain else f"Reshape to {graph.rank(node.outputs[0])}-D between Conv ({_named(node)})"
    return None


def _joins(node: ir.Node) -> bool:
    computed = {value for value in node.inputs if value is not None and value.producer() is not None}
    return len([v for v in computed if not graph.is_constant(v) and v.dtype in graph.FLOAT_TYPES]) > 1


def _named(node: ir.Node) -> str:
    return f"{node.op_type} '{node.name}'"


def count_nodes(written: ir.Graph, prediction: Prediction) -> NodeCounts:
    """The report's node counts for a file with Q/DQ, as its split is predicted.

    Args:
        written: the graph as the file has it, with names.
        prediction: of the same graph, its pairs taken out.
    """
    on_cpu = {place.name for place in prediction.nodes if place.place is Place.CPU}
    cpu = edge = total = 0
    for node in written:
        if graph.op_key(node) == "Constant":
            continue
        if graph.op_key(node) not in PAIRS:
            total += 1
            cpu += str(node.name) in on_cpu
            continue
        readers = [reader for reader, _ in graph.readers(node.outputs[0])]
        ends = node.outputs[0].is_graph_output()
        # A DQ with several readers is copied for each of them.
        copies = max(1, len(readers) + ends) if node.op_type.endswith("DequantizeLinear") else 1
        total += copies
        edge += _edges(node, readers, on_cpu, ends=ends)
    if not prediction.npu_nodes:
        edge = total - cpu
    return NodeCounts(total, total - cpu - edge, cpu, edge)


def _edges(node: ir.Node, readers: Sequence[ir.Node], on_cpu: Collection[str], *, ends: bool) -> int:
    """How many of a Q, or of the copies of a DQ, stand on the CPU's side of a border."""
    if node.op_type.endswith("DequantizeLinear"):
        return ends + sum(1 for reader in readers if str(reader.name) in on_cpu)
    maker = None if node.inputs[0] is None else node.inputs[0].producer()
    return int(maker is None or str(maker.name) in on_cpu)
