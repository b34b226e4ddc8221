"""Detection heads: tensors of different meaning forced onto one scale (P13)."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from roundel.check.facts import Facts
from roundel.check.patterns import maker_of
from roundel.check.types import Hit, Rule, Severity
from roundel.model.graph import is_constant, op_key
from roundel.model.reach import downstream
from roundel.plan.detection_head import MOVERS, find_detection_head, joins_scores

_PROBABILITIES = {"Sigmoid": "probabilities (Sigmoid)", "Softmax": "probabilities (Softmax)"}
_LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div", "Pow", "Exp"})
_MOST_NAMES = 6
_BY_ITSELF = "Effort fast and high do so behind the last layers."


def _heads(facts: Facts) -> Iterator[Hit]:
    if not facts.format.integer:
        return
    head = find_detection_head(facts.given.graph)
    for node in facts.given.graph:
        if op_key(node) != "Concat":
            continue
        meanings = {meaning for value in node.inputs if (meaning := _meaning(value)) is not None}
        certain = meanings & set(_PROBABILITIES.values())
        if node in head and joins_scores(node) and meanings == certain:
            meanings.add("values of another kind")
        if certain and meanings - certain:
            text = f"Concat of {len(node.inputs)}: {' with '.join(sorted(meanings))}"
            yield Hit(Severity.WARNING, text, str(node.name), _exclusion(facts.given.graph, node))


def _meaning(value: ir.Value | None) -> str | None:
    """What kind of number a Concat input holds, looking back through operators that only move values."""
    node = None if value is None else value.producer()
    while node is not None and op_key(node) in MOVERS:
        node = maker_of(node)
    if node is None:
        return None
    op = op_key(node)
    if op in _PROBABILITIES:
        return _PROBABILITIES[op]
    if op in _LAYERS:
        return "box distribution (DFL)" if _after_softmax(node) else "raw values"
    if op in _ARITHMETIC and not _is_gate(node):
        return "box arithmetic"
    return None


def _after_softmax(node: ir.Node) -> bool:
    """The expectation over bins: a layer that reads a Softmax."""
    source = maker_of(node)
    while source is not None and op_key(source) in MOVERS:
        source = maker_of(source)
    return source is not None and op_key(source) == "Softmax"


def _is_gate(node: ir.Node) -> bool:
    """SiLU and residual sums join two computed tensors; decoding of boxes uses constants."""
    inputs = [value for value in node.inputs if value is not None]
    return len(inputs) > 1 and not any(is_constant(value) for value in inputs)


def _exclusion(graph: ir.Graph, concat: ir.Node) -> str:
    """The words for the command line that keep the head in float, from the last layers to the outputs."""
    starts = _layer_outputs(concat)
    ends = _reached_outputs(graph, concat)
    if not starts or not ends or len(starts) + len(ends) > _MOST_NAMES:
        return f"Keep the head in float: --exclude '{concat.name}', or use --preset a16w8. {_BY_ITSELF}"
    border = f"{','.join(starts)}->{','.join(ends)}"
    return f"Keep the head in float: --exclude-subgraph '{border}'; or a16w8. {_BY_ITSELF}"


def _layer_outputs(concat: ir.Node) -> list[str]:
    found: dict[str, None] = {}
    stack, seen = [value.producer() for value in concat.inputs if value is not None], set[ir.Node]()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if op_key(node) in _LAYERS and not _after_softmax(node):
            found[str(node.outputs[0].name)] = None
        else:
            stack.extend(node.predecessors())
    return sorted(found)


def _reached_outputs(graph: ir.Graph, start: ir.Node) -> list[str]:
    reached = downstream(graph, [start])
    return [str(value.name) for value in graph.outputs if value.producer() in reached]


RULES = (
    Rule(
        "P13",
        "detection head",
        "Concat gives one scale to boxes (hundreds) and scores (0 to 1): the scores become zero.",
        "Keep the head in float with --exclude-subgraph, or use --preset a16w8.",
        _heads,
    ),
)
