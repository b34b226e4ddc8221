"""What the file itself is like: opset, size, half precision, inputs, names (P01, P14, P15, P16, P22)."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from roundel.check.facts import Facts
from roundel.check.types import Hit, Rule, Severity
from roundel.model.graph import iter_values, weight_bytes
from roundel.targets.devices import MINIMUM_OPSET, PROTOBUF_BYTES, RECOMMENDED_OPSET


def _opset(facts: Facts) -> Iterator[Hit]:
    found = facts.loaded.source_opset
    automatic = facts.float_model and found < RECOMMENDED_OPSET
    if found < MINIMUM_OPSET:
        yield Hit(
            Severity.ERROR, f"opset {found}, the compilers need {MINIMUM_OPSET} or newer", automatic=automatic
        )
    elif found != RECOMMENDED_OPSET:
        yield Hit(Severity.NOTE, f"opset {found}, recommended is {RECOMMENDED_OPSET}", automatic=automatic)


def _half(facts: Facts) -> Iterator[Hit]:
    half = [value for value in iter_values(facts.raw.graph) if value.dtype is ir.DataType.FLOAT16]
    if half:
        first = next((str(value.name) for value in half if value.name), None)
        yield Hit(Severity.WARNING, f"{len(half)} tensors are float16", first, automatic=facts.float_model)


def _size(facts: Facts) -> Iterator[Hit]:
    count = weight_bytes(facts.raw)
    if count > PROTOBUF_BYTES:
        yield Hit(
            Severity.WARNING,
            f"{count / 2**30:.1f} GiB of weights, a protobuf file holds {PROTOBUF_BYTES} bytes",
        )


def _weights_as_inputs(facts: Facts) -> Iterator[Hit]:
    graph = facts.raw.graph
    both = [str(value.name) for value in graph.inputs if value.name in graph.initializers]
    if both:
        yield Hit(
            Severity.NOTE,
            f"{len(both)} initializers are graph inputs as well",
            both[0],
            automatic=facts.float_model,
        )


def _names(facts: Facts) -> Iterator[Hit]:
    unnamed = [node for node in facts.raw.graph if not node.name]
    if unnamed:
        made = next((str(v.name) for node in unnamed for v in node.outputs if v.name), None)
        yield Hit(
            Severity.NOTE,
            f"{len(unnamed)} of {len(facts.raw.graph)} nodes have no name",
            made,
            automatic=facts.float_model,
        )


RULES = (
    Rule(
        "P01",
        "opset",
        "The compilers are built for opset 17; below 11 Resize does not compile at all.",
        "Export the model at opset 17.",
        _opset,
    ),
    Rule(
        "P14",
        "half precision",
        "The compilers take float32 or Q/DQ models; float16 tensors are refused.",
        "Export in float32; quantize widens float16 models by itself.",
        _half,
    ),
    Rule(
        "P15",
        "more than 2 GB",
        "A protobuf file ends at 2 GB; the model cannot be written as one file.",
        "Write weights beside the model: -s output.external_data=true.",
        _size,
    ),
    Rule(
        "P16",
        "weights as inputs",
        "A weight that a caller may replace cannot be folded or quantized as a constant.",
        "Remove initializers from the graph inputs; quantize does so by itself.",
        _weights_as_inputs,
    ),
    Rule(
        "P22",
        "unnamed nodes",
        "Nodes without names cannot be excluded, and reports cannot point at them.",
        "Export with node names; quantize numbers the nameless ones by operator.",
        _names,
    ),
)
