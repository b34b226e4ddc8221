"""Detection heads, with the signs that say so and the option that keeps them in float."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from roundel.calibrate.collect import collect
from roundel.calibrate.observers import Observer, StatKind
from roundel.model.graph import constant_array, is_constant, is_float32
from roundel.plan.detection_head import sums_distribution, tail_of
from roundel.plan.types import QuantPlan
from roundel.sensitivity.types import Head
from roundel.types import Sample

_ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div", "Exp", "Pow"})
_SELECTION = frozenset({"NonMaxSuppression", "TopK"})
_APART = 16.0  # times; what a quantizer of 8 bits leaves for the smaller tensor is then 4 bits
_GRID = 16  # positions; fewer constants are no grid of anchors


def find_head(model: ir.Model, plan: QuantPlan, samples: Sequence[Sample]) -> Head | None:
    """The head, if the graph ends in one and any of it would be quantized."""
    tail = tail_of(model.graph)
    signs = tuple(dict.fromkeys(_signs(tail, _joined(model, tail, samples))))
    quantized = tuple(str(n.name) for n in tail if (v := plan.nodes.get(str(n.name))) and v.quantized)
    if not signs or not quantized:
        return None
    return Head(signs, quantized, _option(model.graph, tail))


def _joined(model: ir.Model, tail: Iterable[ir.Node], samples: Sequence[Sample]) -> Mapping[str, Observer]:
    """Ranges of what the tail's Concats join; where their scales align, calibration saw the result only."""
    values = [value for node in tail if node.op_type == "Concat" for value in node.inputs]
    names = [str(v.name) for v in values if is_float32(v) and not is_constant(v) and v is not None]
    return collect(model, dict.fromkeys(names, StatKind.MINMAX), samples, keep=0).stats if names else {}


def _signs(tail: Iterable[ir.Node], stats: Mapping[str, Observer]) -> Iterable[str]:
    for node in tail:
        if sums_distribution(node):
            yield "a distribution over distances is summed up (DFL)"
        elif node.op_type == "Concat":
            ratio = _apart(node, stats)
            if ratio >= _APART:
                yield f"Concat '{node.name}' joins tensors whose ranges differ {ratio:.0f} times"
        elif node.op_type in _SELECTION:
            yield f"{node.op_type} chooses among boxes"
        elif node.op_type in _ARITHMETIC and any(_is_grid(value) for value in node.inputs):
            yield "a grid of anchors or strides is applied (box decoding)"


def _apart(node: ir.Node, stats: Mapping[str, Observer]) -> float:
    """How many times the largest range of a Concat's inputs is the smallest."""
    seen = [stats[str(v.name)] for v in node.inputs if v is not None and str(v.name) in stats]
    reach = [max(abs(s.low), abs(s.high)) for s in seen]
    reach = [size for size in reach if size > 0]
    return max(reach) / min(reach) if len(reach) > 1 else 1.0


def _is_grid(value: ir.Value | None) -> bool:
    """Constants that differ from place to place."""
    array = constant_array(value) if is_constant(value) else None
    if array is None or array.dtype.kind != "f" or array.size < _GRID:
        return False
    return len(np.unique(array)) > 1 and max(array.shape) >= _GRID


def _option(graph: ir.Graph, tail: list[ir.Node]) -> str:
    """The whole tail between the nodes that it begins with and those that it ends in."""
    inside = set(tail)
    starts = [n for n in tail if not any(p in inside for p in n.predecessors())]
    ends = [n for n in tail if not any(s in inside for s in n.successors())]
    words = "->".join(",".join(str(n.name) for n in nodes) for nodes in (starts, ends))
    return f"--exclude-subgraph {shlex.quote(words)}"
