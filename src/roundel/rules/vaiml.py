"""What the BF16 and mixed compiler (VAIML) is known to leave to the CPU (P27 to P31, Q17).

Each of these has a message of its own in the compiler's log; `targets/vaiml.py` pairs the two. Placement is
not predicted from them: how much else such a node takes along is not known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx_ir as ir

from roundel.model import graph
from roundel.rules.facts import Facts
from roundel.rules.types import Finding, Place, Severity, rule
from roundel.targets.npu import Format
from roundel.targets.vaiml import SMALL_TENSOR

_FLOATS = graph.FLOAT_TYPES
_RESHAPES = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})
_WIDE = frozenset({ir.DataType.INT64, ir.DataType.UINT64, ir.DataType.DOUBLE})


def _judged(facts: Facts) -> ir.Graph | tuple[()]:
    """The nodes that VAIML would see; none where another compiler is asked."""
    return facts.prepared.graph if facts.format in (Format.BF16, Format.FLOAT) else ()


def _on_cpu(facts: Facts) -> set[str]:
    return {place.name for place in facts.before.nodes if place.place is Place.CPU}


def _next_to(node: ir.Node, cpu: set[str]) -> str | None:
    """Which end of a partition the node lies at, or None."""
    source = node.inputs[0] if node.inputs else None
    if source is not None and source.is_graph_input():
        return f"behind the input '{source.name}'"
    for out in node.outputs:
        if out.is_graph_output():
            return f"in front of the output '{out.name}'"
    for other in (*node.predecessors(), *node.successors()):
        if other.name in cpu:
            return f"next to {other.op_type} '{other.name}', which is expected on the CPU"
    return None


@rule("P27", "boolean select", "Select numbers instead: multiply by the mask, or export the mask as float.")
def _selects(facts: Facts) -> Iterator[Finding]:
    """The BF16 compiler has no such kernel: 'Datatype Unsupported [FE]: tosa.select : i1'."""
    for node in _judged(facts):
        if graph.op_key(node) == "Where" and node.outputs[0].dtype is ir.DataType.BOOL:
            yield Finding(Severity.WARNING, "Where selects between booleans", str(node.name))


@rule("P28", "lookup in a table", "Look the table up on the host and feed its rows to the model.")
def _lookups(facts: Facts) -> Iterator[Finding]:
    """'Unsupported gather with constant data input and non-scalar indices [FE]': it stays on the CPU."""
    for node in _judged(facts):
        if graph.op_key(node) != "Gather" or not graph.is_constant(node.inputs[0]):
            continue
        table, indices = graph.static_shape(node.inputs[0]), node.inputs[1]
        if node.outputs[0].dtype in _FLOATS and not graph.is_constant(indices) and graph.rank(indices) != 0:
            text = f"Gather from a constant {list(table or ())} with a tensor of indices"
            yield Finding(Severity.WARNING, text, str(node.name))


@rule("P29", "Transpose at an edge", "Feed and read the layout behind the Transpose, and drop it.")
def _transposes(facts: Facts) -> Iterator[Finding]:
    """'onnx.Transpose in function edge': at the edge of a partition it may stay on the CPU."""
    cpu = _on_cpu(facts)
    for node in _judged(facts):
        place = _next_to(node, cpu) if graph.op_key(node) == "Transpose" else None
        if place is not None:
            yield Finding(Severity.NOTE, f"Transpose {place}", str(node.name))


@rule("P30", "Reshape at an edge", "Reshape on the host, or get the node behind it onto the NPU.")
def _reshapes(facts: Facts) -> Iterator[Finding]:
    """'Reshape with start garbage cannot be merged into non-AIE consumer'; and only bf16, fp16 and 8 bits."""
    cpu = _on_cpu(facts)
    for node in _judged(facts):
        if graph.op_key(node) not in _RESHAPES:
            continue
        if node.inputs[0] is not None and node.inputs[0].dtype in _WIDE:
            text = f"{node.op_type} of {node.inputs[0].dtype}, which the compiler does not take"
            yield Finding(Severity.NOTE, text, str(node.name))
            continue
        reader = next((each for each in node.successors() if each.name in cpu), None)
        if reader is not None:
            text = f"{node.op_type} feeds {reader.op_type} '{reader.name}', which is expected on the CPU"
            yield Finding(Severity.NOTE, text, str(node.name))


@rule("P31", "small edge tensor", "Leave it: the compiler does so on purpose, and it costs little.")
def _small(facts: Facts) -> Iterator[Finding]:
    """'Small tensor (threshold 100) in function edge': such an edge is computed on the CPU."""
    judged = _judged(facts)
    if not isinstance(judged, ir.Graph):
        return
    fed = [value for value in judged.inputs if value.name not in judged.initializers]
    for value in (*fed, *judged.outputs):
        shape = graph.static_shape(value)
        if shape is not None and value.dtype in _FLOATS and math.prod(shape) < SMALL_TENSOR:
            text = f"'{value.name}' has {math.prod(shape)} elements, fewer than {SMALL_TENSOR}"
            yield Finding(Severity.NOTE, text, value.name)


@rule("Q17", "border pair", "Quantize with --preset vint8: int8 around 0, powers of two.")
def _borders(facts: Facts) -> Iterator[Finding]:
    """'Standalone quantizeLinear is not supported [FE]': at a border VAIML matches no other pair."""
    if facts.stored is None or facts.format not in (Format.BF16, Format.FLOAT):
        return
    values = graph.values_by_name(facts.graph)
    for name, tensor in facts.tensors.items():
        value = values.get(name)
        if tensor.constant or not tensor.dtype.startswith(("int", "uint")) or value is None:
            continue
        if not (value.is_graph_input() or value.is_graph_output() or _beside_float(value, facts)):
            continue
        faults = [] if tensor.power_of_two else ["a scale that is no power of two"]
        faults += ["a zero point that is not 0"] if tensor.zero_point.any() else []
        if faults:
            yield Finding(Severity.WARNING, f"{tensor.dtype} with {' and '.join(faults)}", name)


def _beside_float(value: ir.Value, facts: Facts) -> bool:
    """Whether a node around the tensor has another float tensor that is not stored."""
    maker = value.producer()
    around = [*value.consumers(), *(() if maker is None else (maker,))]
    others = [each for node in around for each in (*node.inputs[:2], *node.outputs) if each is not None]
    return any(
        each.dtype in _FLOATS and each.name not in facts.tensors and not graph.is_constant(each)
        for each in others
    )
