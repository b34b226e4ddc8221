"""One DequantizeLinear for each reader: some compilers follow a tensor only along its own chain."""

from __future__ import annotations

import onnx_ir as ir

from roundel.qdq.pairs import Names


def dedicate_dequantizers(graph: ir.Graph) -> int:
    """Copy every DQ node that several inputs read, one for each; exact. Returns the number of copies."""
    names, copies = Names(graph), 0
    for node in [n for n in graph if n.op_type == "DequantizeLinear"]:
        value = node.outputs[0]
        uses = list(value.uses())
        # The original keeps its name for the first reader, or for the graph output that it is.
        for use in uses if value.is_graph_output() else uses[1:]:
            use.node.replace_input_with(use.idx, _copy(node, graph, names).outputs[0])
            copies += 1
    return copies


def _copy(node: ir.Node, graph: ir.Graph, names: Names) -> ir.Node:
    value = node.outputs[0]
    out = ir.Value(name=names(str(value.name)), shape=value.shape, type=value.type)
    twin = ir.Node(
        node.domain,
        node.op_type,
        node.inputs,
        attributes=list(node.attributes.values()),
        outputs=[out],
        name=names(str(node.name)),
    )
    graph.insert_after(node, twin)
    return twin
