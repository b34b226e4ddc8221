"""Which nodes and tensors a user's words mean; words that mean nothing are an error with suggestions."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence

import onnx_ir as ir

from roundel.errors import SelectionError, did_you_mean
from roundel.model.graph import op_key
from roundel.model.reach import downstream, upstream
from roundel.recipe import Subgraph


def matching_nodes(graph: ir.Graph, selectors: Sequence[str], option: str) -> dict[str, str]:
    """Node name -> the selector that matched it. A tensor's name stands for the node that makes it."""
    found: dict[str, str] = {}
    for selector in selectors:
        hits = _nodes(graph, selector)
        if not hits:
            raise _nothing(graph, selector, option)
        for name in hits:
            found.setdefault(name, selector)
    return found


def matching_tensors(names: Iterable[str], selectors: Sequence[str], option: str) -> dict[str, str]:
    """Tensor name -> the selector that matched it."""
    pool = list(names)
    found: dict[str, str] = {}
    for selector in selectors:
        hits = _match(pool, selector)
        if not hits:
            raise SelectionError(
                f"No tensor matches '{selector}'.",
                where=option,
                hint=did_you_mean(selector, pool) or "List the tensors with `roundel explain MODEL`.",
            )
        for name in hits:
            found.setdefault(name, selector)
    return found


def subgraph_nodes(graph: ir.Graph, subgraph: Subgraph, option: str) -> list[str]:
    """The nodes on any path from the inputs to the outputs (nodes or tensors), both ends included."""
    starts = [node for word in subgraph.inputs for node in _anchors(graph, word, option, reading=True)]
    ends = [node for word in subgraph.outputs for node in _anchors(graph, word, option, reading=False)]
    between = downstream(graph, starts) & upstream(graph, ends)
    if not between:
        raise SelectionError(
            "No path leads from the subgraph's inputs to its outputs.",
            where=option,
            observed=f"{', '.join(subgraph.inputs)} -> {', '.join(subgraph.outputs)}",
            hint="Name tensors or nodes in the order in which data flows.",
        )
    return [str(node.name) for node in graph if node in between]


def _match(pool: Sequence[str], selector: str) -> list[str]:
    if selector.startswith("re:"):
        try:
            pattern = re.compile(selector[3:])
        except re.error as error:
            raise SelectionError(
                "The regular expression is not valid.", where=selector, observed=error
            ) from error
        return [name for name in pool if pattern.search(name)]
    exact = [name for name in pool if name == selector]
    if exact or not any(c in selector for c in "*?["):
        return exact
    return [name for name in pool if fnmatch.fnmatchcase(name, selector)]


def _nodes(graph: ir.Graph, selector: str) -> list[str]:
    if selector.startswith("op:"):
        return [str(n.name) for n in graph if selector[3:] in (n.op_type, op_key(n))]
    hits = _match([str(n.name) for n in graph], selector)
    if hits:
        return hits
    makers = {str(v.name): str(n.name) for n in graph for v in n.outputs if v.name}
    return list(dict.fromkeys(makers[name] for name in _match(list(makers), selector)))


def _nothing(graph: ir.Graph, selector: str, option: str) -> SelectionError:
    if selector.startswith("op:"):
        kinds = sorted({n.op_type for n in graph})
        hint = did_you_mean(selector[3:], kinds)
        return SelectionError(
            f"The model has no '{selector[3:]}' operator.", where=option, expected=", ".join(kinds), hint=hint
        )
    names = [str(n.name) for n in graph] + [str(v.name) for n in graph for v in n.outputs]
    hint = did_you_mean(selector, names) or "List the nodes with `roundel inspect MODEL --nodes`."
    return SelectionError(f"No node or tensor matches '{selector}'.", where=option, hint=hint)


def _anchors(graph: ir.Graph, word: str, option: str, *, reading: bool) -> list[ir.Node]:
    """Nodes that a subgraph border means: the node itself, or the readers / the maker of a tensor."""
    by_name = {str(n.name): n for n in graph}
    if word in by_name:
        return [by_name[word]]
    for value in [*graph.inputs, *(v for n in graph for v in n.outputs)]:
        if value.name == word:
            if reading:
                return [n for n in value.consumers() if n.graph is graph]
            maker = value.producer()
            return [maker] if maker is not None else []
    raise _nothing(graph, word, option)
