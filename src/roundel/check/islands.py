"""NPU nodes as groups, none of which data leaves and enters again."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir


def number_islands(nodes: Sequence[ir.Node], on_npu: Collection[ir.Node]) -> dict[ir.Node, int]:
    """The island of every NPU node, counted from 0 in execution order.

    A node's phase is the number of times that data on any way to it came back from the CPU. Connected
    NPU nodes of one phase are one island. A way that leaves an island through the CPU comes back in a
    later phase, so no island waits for itself. One walk over nodes and edges.

    Args:
        nodes: in topological order.
        on_npu: those that the NPU takes.
    """
    phase: dict[ir.Node, int] = {}
    parent: dict[ir.Node, ir.Node] = {}
    for node in nodes:
        before = [other for other in node.predecessors() if other in phase]
        if node not in on_npu:
            # What no NPU node comes before delays nothing: phase -1.
            phase[node] = max((phase[other] for other in before), default=-1)
            continue
        phase[node] = max((phase[p] if p in on_npu else phase[p] + 1 for p in before), default=0)
        parent[node] = node
        for other in before:
            if other in on_npu and phase[other] == phase[node]:
                parent[_root(parent, other)] = _root(parent, node)
    numbers: dict[ir.Node, int] = {}
    return {node: numbers.setdefault(_root(parent, node), len(numbers)) for node in nodes if node in parent}


def _root(parent: dict[ir.Node, ir.Node], node: ir.Node) -> ir.Node:
    while parent[node] is not node:
        parent[node] = parent[parent[node]]
        node = parent[node]
    return node
