"""Shapes, control flow and weights of the whole graph (P02, P03, P04, P05, P21)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.model import graph
from roundel.plan.marking import channel_axis
from roundel.rules.facts import Facts, fixed_rows
from roundel.rules.types import Finding, Severity, rule
from roundel.targets.npu import MINIMUM_CONVS, MINIMUM_OPSET, PROTOBUF_BYTES, RECOMMENDED_OPSET, Compiler
from roundel.targets.operators import LAYERS, OPERATORS

_IMAGE_RANK = 4


@rule("P02", "open shapes", "Fix the sizes of the inputs: -s prepare.fixed_shapes={NAME: [1, …]}.")
def _open_shapes(facts: Facts) -> Iterator[Finding]:
    """The compilers build code for fixed sizes; only the batch axis may stay open."""
    opened = [value for value in _fed(facts) if value.shape is None or _open_dims(value)]
    for value in opened:
        if value.shape is None:
            text = f"input '{value.name}' has no shape, not even 1 dimension"
            yield Finding(Severity.ERROR, text, value.name)
        else:
            words = ", ".join(str(d) if isinstance(d, int) else str(d.value or "?") for d in value.shape)
            text = f"input '{value.name}' is [{words}], {_open_dims(value)} open beside the batch"
            yield Finding(Severity.ERROR, text, value.name, _fixing(value))
    if not opened:
        yield from _data_dependent(facts)
        yield from _computed_shapes(facts)


def _fixing(value: ir.Value) -> str:
    sizes = [str(d) if isinstance(d, int) else "?" for d in value.shape or ()]
    sizes[0] = "1" if sizes[0] == "?" else sizes[0]
    text = f"Fix it: -s 'prepare.fixed_shapes={{{value.name}: [{', '.join(sizes)}]}}'"
    return text + (", with numbers for each ?." if "?" in sizes else ".")


def _computed_shapes(facts: Facts) -> Iterator[Finding]:
    """Arithmetic on an open batch axis, which a fixed one would turn into constants."""
    open_inputs = [v for v in _fed(facts) if v.shape and not isinstance(v.shape[0], int)]
    nodes = [place for place in facts.before.nodes if place.rule == "P02"]
    if open_inputs and nodes:
        text = f"{len(nodes)} nodes compute shapes at run time from an open batch axis"
        yield Finding(Severity.WARNING, text, nodes[0].name, _fixing(open_inputs[0]))


def _data_dependent(facts: Facts) -> Iterator[Finding]:
    """With fixed inputs, what is still open depends on the data."""
    values = [v for node in facts.prepared.graph for v in node.outputs if v.dtype in graph.FLOAT_TYPES]
    loose = [v for v in values if v.shape is not None and not all(isinstance(d, int) for d in v.shape)]
    if loose:
        text = f"{len(loose)} tensors inside the graph have sizes that depend on the data"
        fix = "Cut the graph before it and do the rest (selection, sorting) on the host."
        yield Finding(Severity.WARNING, text, str(loose[0].name), fix)


def _open_dims(value: ir.Value) -> int:
    """Open dimensions other than the batch."""
    dims = list(value.shape or ())
    return sum(1 for d in dims[1:] if not isinstance(d, int) or d < 0)


def _fed(facts: Facts) -> list[ir.Value]:
    return [v for v in facts.graph.inputs if v.name not in facts.graph.initializers]


@rule("P03", "fixed batch", "Export with batch 1, or with an open batch axis.")
def _batch(facts: Facts) -> Iterator[Finding]:
    """The compilers take batch 1 or an open batch axis; of a larger one X1 computes the first sample only."""
    first = facts.device.compiler is Compiler.X1 and fixed_rows(facts.graph) > 1
    for value in _fed(facts):
        dims = list(value.shape or ())
        if len(dims) > 1 and isinstance(dims[0], int) and dims[0] > 1:
            severity = Severity.ERROR if first or len(dims) == _IMAGE_RANK else Severity.WARNING
            yield Finding(severity, f"input '{value.name}' has a fixed batch of {dims[0]}", value.name)


@rule("P04", "too few Conv", "Use --preset bf16 (on stx or krk), whose compiler has no such limit.")
def _few_convs(facts: Facts) -> Iterator[Finding]:
    """The integer compiler offloads only graphs with two or more Conv; this one stays on the CPU."""
    convs = sum(1 for node in facts.prepared.graph if graph.op_key(node) == "Conv")
    enough = facts.device.compiler is Compiler.X1 or convs >= MINIMUM_CONVS  # X1 takes a single one
    if facts.format.integer and not enough:
        yield Finding(Severity.ERROR, f"{convs} Conv in the graph, at least {MINIMUM_CONVS} are needed")


@rule("P05", "control flow", "Export with the loop unrolled, or cut the model there and loop on the host.")
def _control_flow(facts: Facts) -> Iterator[Finding]:
    """The NPU runs straight-line graphs: Loop, If and Scan and all inside them stay on the CPU."""
    for node in facts.graph:
        if graph.has_subgraph(node):
            bodies = [a.as_graph() for a in node.attributes.values() if a.type is ir.AttributeType.GRAPH]
            inside = sum(len(body) for body in bodies)
            yield Finding(Severity.ERROR, f"{node.op_type} with {inside} nodes in its bodies", str(node.name))


@rule("P21", "broken weights", "Repair the checkpoint, or prune the channels and export again.")
def _weights(facts: Facts) -> Iterator[Finding]:
    """NaN or infinite values have no scale, so the node stays in float; zero channels waste time."""
    seen: set[ir.Value] = set()
    for node in facts.graph:
        for index, value in enumerate(node.inputs):
            array = graph.constant_array(value)
            if value is None or value in seen or array is None or value.dtype not in graph.FLOAT_TYPES:
                continue
            seen.add(value)
            weight = index == 1 and graph.op_key(node) in LAYERS
            broken = array.size - int(np.isfinite(array.astype(np.float32, copy=False)).sum())
            if broken:
                severity = Severity.ERROR if weight else Severity.WARNING
                where = f"of {node.op_type} '{node.name}'"
                text = f"{broken} of {array.size} values {where} are NaN or infinite"
                yield Finding(severity, text, value.name)
            elif weight and array.size:
                yield from _zeros(node, value, array)


_IDLE = "They are computed like the others and change nothing."


def _zeros(node: ir.Node, value: ir.Value, array: NDArray[Any]) -> Iterator[Finding]:
    axis = channel_axis(node, OPERATORS[graph.op_key(node)], array.ndim)
    live = (array != 0).any(axis=tuple(a for a in range(array.ndim) if a != axis))
    dead = int(live.size - np.count_nonzero(live))
    where = f"{node.op_type} '{node.name}'"
    if dead == live.size:
        yield Finding(Severity.WARNING, f"all {array.size} weights of {where} are zero", value.name)
    elif dead:
        text = f"{dead} of {live.size} output channels of {where} are zero"
        yield Finding(Severity.NOTE, text, value.name, "Prune them; training often leaves some.", why=_IDLE)


@rule("P01", "opset", "Export the model at opset 17.")
def _opset(facts: Facts) -> Iterator[Finding]:
    """The compilers are built for opset 17; below 11 Resize does not compile at all."""
    found = facts.loaded.source_opset
    automatic = facts.float_model and found < RECOMMENDED_OPSET
    if found < MINIMUM_OPSET:
        text = f"opset {found}, the compilers need {MINIMUM_OPSET} or newer"
        yield Finding(Severity.ERROR, text, automatic=automatic)
    elif found != RECOMMENDED_OPSET:
        text = f"opset {found}, recommended is {RECOMMENDED_OPSET}"
        yield Finding(Severity.NOTE, text, automatic=automatic)


@rule("P14", "half precision", "Export in float32; quantize widens float16 models by itself.")
def _half(facts: Facts) -> Iterator[Finding]:
    """The compilers take float32 or Q/DQ models; float16 tensors are refused."""
    half = [value for value in graph.iter_values(facts.raw.graph) if value.dtype is ir.DataType.FLOAT16]
    if half:
        first = next((str(value.name) for value in half if value.name), None)
        text = f"{len(half)} tensors are float16"
        yield Finding(Severity.WARNING, text, first, automatic=facts.float_model)


@rule("P15", "more than 2 GB", "Write weights beside the model: -s output.external_data=true.")
def _size(facts: Facts) -> Iterator[Finding]:
    """A protobuf file ends at 2 GB; the model cannot be written as one file."""
    count = graph.weight_bytes(facts.raw)
    if count > PROTOBUF_BYTES:
        text = f"{count / 2**30:.1f} GiB of weights, a protobuf file holds {PROTOBUF_BYTES} bytes"
        yield Finding(Severity.WARNING, text)


@rule("P16", "weights as inputs", "Remove initializers from the graph inputs; quantize does so by itself.")
def _weights_as_inputs(facts: Facts) -> Iterator[Finding]:
    """A weight that a caller may replace cannot be folded or quantized as a constant."""
    raw = facts.raw.graph
    both = [str(value.name) for value in raw.inputs if value.name in raw.initializers]
    if both:
        text = f"{len(both)} initializers are graph inputs as well"
        yield Finding(Severity.NOTE, text, both[0], automatic=facts.float_model)


@rule("P22", "unnamed nodes", "Export with node names; quantize numbers the nameless ones by operator.")
def _names(facts: Facts) -> Iterator[Finding]:
    """Nodes without names cannot be excluded, and reports cannot point at them."""
    unnamed = [node for node in facts.raw.graph if not node.name]
    if unnamed:
        made = next((str(v.name) for node in unnamed for v in node.outputs if v.name), None)
        text = f"{len(unnamed)} of {len(facts.raw.graph)} nodes have no name"
        yield Finding(Severity.NOTE, text, made, automatic=facts.float_model)
