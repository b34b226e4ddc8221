"""What leads to a node, and what follows from it, within one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import onnx_ir as ir


def upstream(graph: ir.Graph, starts: Iterable[ir.Node]) -> set[ir.Node]:
    """These nodes and all that they are made from."""
    return _reached(graph, starts, lambda node: node.predecessors())


def downstream(graph: ir.Graph, starts: Iterable[ir.Node]) -> set[ir.Node]:
    """These nodes and all that is made from them."""
    return _reached(graph, starts, lambda node: node.successors())


def around(graph: ir.Graph, starts: Iterable[ir.Node], within: set[ir.Node]) -> set[ir.Node]:
    """These nodes and all that hang together with them by nodes of a given set."""
    return within & _reached(
        graph, starts, lambda node: (n for n in (*node.predecessors(), *node.successors()) if n in within)
    )


def _reached(
    graph: ir.Graph, starts: Iterable[ir.Node], onward: Callable[[ir.Node], Iterable[ir.Node]]
) -> set[ir.Node]:
    found, stack = set[ir.Node](), list(starts)
    while stack:
        node = stack.pop()
        if node.graph is graph and node not in found:
            found.add(node)
            stack += onward(node)
    return found
