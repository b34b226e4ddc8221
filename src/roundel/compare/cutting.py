"""A model reduced to what computes some of its tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import onnx_ir as ir

from roundel.model.graph import values_by_name
from roundel.qdq import attach


def cut_to(model: ir.Model, outputs: Sequence[str], *, drop_inputs: Collection[str] = ()) -> ir.Model:
    """A copy with these outputs and nothing that they do not need; AMD's operators have their bodies.

    Args:
        model: it is not changed.
        outputs: tensors of the main graph.
        drop_inputs: graph inputs to leave out; none of the outputs may depend on them.
    """
    copy = model.clone()
    graph, values = copy.graph, values_by_name(copy.graph)
    graph.outputs.clear()
    for name in outputs:
        value = values[name]
        value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
        graph.outputs.append(value)
    read: set[ir.Value] = set(graph.outputs)
    needed: set[ir.Node] = set()
    pending = list(graph.outputs)
    while pending:
        node = pending.pop().producer()
        if node is None or node in needed:
            continue
        needed.add(node)
        inputs = [value for value in (*node.inputs, *_captured(node)) if value is not None]
        read.update(inputs)
        pending += inputs
    graph.remove([node for node in graph if node not in needed])
    for value in [v for v in graph.inputs if v.name in drop_inputs]:
        graph.inputs.remove(value)
    # ONNX Runtime refuses to be lent a weight that nothing reads.
    for name in [name for name, value in graph.initializers.items() if value not in read]:
        del graph.initializers[name]
    return attach(copy)


def _captured(node: ir.Node) -> Iterator[ir.Value]:
    """Values that the bodies of a node read."""
    for attribute in node.attributes.values():
        if attribute.type is ir.AttributeType.GRAPH:
            for inner in attribute.as_graph().all_nodes():
                yield from (value for value in inner.inputs if value is not None)
