"""Names for nodes: every one has its own, since plans, records and exclusions know a node by it."""

from __future__ import annotations

import onnx_ir as ir


def name_nodes(graph: ir.Graph) -> int:
    """Name the nodes that have no name, or the name of an earlier one; returns how many."""
    taken: set[str] = set()
    pending = []
    for node in graph:
        if node.name and node.name not in taken:
            taken.add(node.name)
        else:
            pending.append(node)
    counters: dict[str, int] = {}
    for node in pending:
        while True:
            index = counters.get(node.op_type, 0)
            counters[node.op_type] = index + 1
            name = f"{node.op_type}_{index}"
            if name not in taken:
                break
        taken.add(name)
        node.name = name
    return len(pending)
