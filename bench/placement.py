"""Compares where two quantized ONNX files quantize, and how.

``python bench/placement.py A.onnx B.onnx`` prints the differences by kind and exits with 0 when there are
none, else 1. As a library: :func:`compare_placement`. Needs onnx and numpy, and no other file of bench/.

A quantized tensor is one that passes through a Q/DQ pair, or an initializer stored as codes behind a DQ.
Tools name things differently, so tensors are matched by original name first, then by the node beside them,
and last by operator types and order; whatever is left is reported with its surroundings.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

Array = npt.NDArray[Any]
Place = tuple[str, int]
Renamed = tuple[str, str, str]
Reads = Sequence[tuple[onnx.NodeProto, int]]

QUANTIZE = frozenset({"QuantizeLinear", "ExtendedQuantizeLinear"})
DEQUANTIZE = frozenset({"DequantizeLinear", "ExtendedDequantizeLinear"})
BLOCK_OPS = frozenset({"BFPQuantizeDequantize", "MXQuantizeDequantize"})
HALF_TYPES = frozenset({onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT16})
WEIGHT_OPS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
# What ONNX Runtime and Quark append to a tensor's name, longest first.
SUFFIXES = (
    "_DequantizeLinear_Output",
    "_QuantizeLinear_Output",
    "_QuantizeLinear_Input",
    "_DequantizeLinear",
    "_quantized",
)
SCALE_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """One tensor that a file quantizes.

    Attributes:
        name: Name of the float tensor, without what the tool appended.
        role: ``activation``, ``weight``, ``bias`` or ``constant``.
        element_type: Type of the codes (``int8``, ``bfloat16``, ...), or the block operator.
        q_domain: Domain of the quantizing node; None for an initializer that is stored as codes.
        dq_domain: Domain of the dequantizing nodes.
        scale: Scale values.
        zero_point: Zero point values.
        axis: Axis of per-channel parameters, else None.
        producer: Operator type that makes the tensor, ``graph input`` or ``initializer``.
        consumers: Operator types that read it, in order; ``graph output`` where it leaves the graph.
        made_at: Node name and output index of the producer.
        read_at: Node name and input index of every consumer.
        codes: Stored codes of an initializer.
    """

    name: str
    role: str
    element_type: str
    q_domain: str | None
    dq_domain: str | None
    scale: tuple[float, ...]
    zero_point: tuple[float, ...]
    axis: int | None
    producer: str
    consumers: tuple[str, ...]
    made_at: Place | None
    read_at: tuple[Place, ...]
    codes: Array | None = field(default=None, compare=False, repr=False)

    def describe(self) -> str:
        """One line: what it is and what surrounds it."""
        return f"{self.role} {self.element_type}, {self.producer} -> {', '.join(self.consumers) or 'nothing'}"


@dataclass(frozen=True, slots=True)
class Difference:
    """One property in which a tensor of both files differs."""

    kind: str
    name: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class PlacementDiff:
    """How two files differ.

    Attributes:
        matched: Number of tensors that both files quantize.
        renamed: Name in A, name in B and how they were matched, for those that do not have the same name.
        only_a: Tensors that only A quantizes.
        only_b: Tensors that only B quantizes.
        differences: Differing properties of matched tensors.
        operators: Operator types (Q/DQ aside) whose number differs: type, number in A, number in B.
    """

    matched: int
    renamed: tuple[Renamed, ...]
    only_a: tuple[QuantizedTensor, ...]
    only_b: tuple[QuantizedTensor, ...]
    differences: tuple[Difference, ...]
    operators: tuple[tuple[str, int, int], ...]

    @property
    def same(self) -> bool:
        """Whether both files quantize the same tensors in the same way."""
        return not (self.only_a or self.only_b or self.differences)


def original_name(name: str) -> str:
    """Takes a tool's endings off a tensor name."""
    return next((name.removesuffix(end) for end in SUFFIXES if name.endswith(end)), name)


class _Graph:
    """Lookups in one model: who makes a tensor, who reads it, which values are constant."""

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = model.graph
        self.nodes = list(graph.node)
        self.outputs = {value.name for value in graph.output}
        self.stored = {tensor.name: tensor for tensor in graph.initializer}
        self.maker: dict[str, tuple[onnx.NodeProto, int]] = {}
        self.readers: dict[str, list[tuple[onnx.NodeProto, int]]] = defaultdict(list)
        for node in self.nodes:
            for index, name in enumerate(node.output):
                self.maker[name] = (node, index)
                if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
                    self.stored[name] = node.attribute[0].t
            for index, name in enumerate(node.input):
                if name:
                    self.readers[name].append((node, index))

    def values(self, node: onnx.NodeProto, index: int) -> Array | None:
        """The constant at an input of a node; None when absent or computed."""
        if index >= len(node.input) or node.input[index] not in self.stored:
            return None
        return np.asarray(numpy_helper.to_array(self.stored[node.input[index]]))

    def type_name(self, name: str) -> str:
        """Element type of a stored tensor."""
        return str(onnx.TensorProto.DataType.Name(self.stored[name].data_type)).lower()


def extract(path: str | Path) -> dict[str, QuantizedTensor]:
    """Lists the quantized tensors of a file.

    Args:
        path: ONNX file.

    Returns:
        The tensors by original name, in file order. A second quantization of the same tensor is ``name#2``.
    """
    graph = _Graph(onnx.load(str(path)))
    found: dict[str, QuantizedTensor] = {}
    for node in graph.nodes:
        tensor = _read(graph, node)
        if tensor is None:
            continue
        copies = 1 + sum(1 for name in found if name.partition("#")[0] == tensor.name)
        key = tensor.name if copies == 1 else f"{tensor.name}#{copies}"
        found[key] = replace(tensor, name=key)
    return found


def _read(graph: _Graph, node: onnx.NodeProto) -> QuantizedTensor | None:
    """The quantized tensor that a node stands for, if it does."""
    if node.op_type in QUANTIZE:
        ends = [reader for reader, _ in graph.readers[node.output[0]] if reader.op_type in DEQUANTIZE]
        return _tensor(graph, node, ends, node.input[0])
    if node.op_type in DEQUANTIZE and node.input[0] in graph.stored:
        return _tensor(graph, None, [node], _stored_name(node))
    if node.op_type in BLOCK_OPS:
        return _tensor(graph, node, [node], node.input[0])
    if node.op_type == "Cast" and node.attribute[0].i in HALF_TYPES:
        ends = [reader for reader, _ in graph.readers[node.output[0]] if reader.op_type == "Cast"]
        return _tensor(graph, node, ends, node.input[0])
    return None


def _stored_name(node: onnx.NodeProto) -> str:
    """Original name of an initializer that is stored as codes: from the codes, or from what the DQ makes."""
    codes, made = str(node.input[0]), str(node.output[0])
    return codes if original_name(codes) != codes else made


def _tensor(
    graph: _Graph, begin: onnx.NodeProto | None, ends: Sequence[onnx.NodeProto], name: str
) -> QuantizedTensor:
    """Describes one quantization from its first node and the nodes that bring it back to float."""
    first = begin if begin is not None else ends[0]
    reads = [place for end in ends for place in graph.readers[end.output[0]]]
    consumers = [reader.op_type for reader, _ in reads]
    consumers += ["graph output" for end in ends if end.output[0] in graph.outputs]
    made = graph.maker.get(name) if begin is not None else None
    constant = begin is None or name in graph.stored
    scale, zero = graph.values(first, 1), graph.values(first, 2)
    return QuantizedTensor(
        name=original_name(name),
        role=_role(reads) if constant else "activation",
        element_type=_element_type(graph, first),
        q_domain=None if begin is None else _domain(begin),
        dq_domain="+".join(sorted({_domain(end) for end in ends})) or None,
        scale=() if scale is None else tuple(float(v) for v in scale.reshape(-1)),
        zero_point=() if zero is None else tuple(float(v) for v in zero.reshape(-1)),
        axis=_axis(first) if scale is not None and scale.size > 1 else None,
        producer="initializer" if constant else made[0].op_type if made else "graph input",
        consumers=tuple(sorted(consumers)),
        made_at=(made[0].name, made[1]) if made and made[0].name else None,
        read_at=tuple((reader.name, index) for reader, index in reads if reader.name),
        codes=graph.values(first, 0) if begin is None else None,
    )


def _role(reads: Reads) -> str:
    roles = {index for reader, index in reads if reader.op_type in WEIGHT_OPS}
    return "bias" if roles == {2} else "weight" if roles and 2 not in roles else "constant"


def _domain(node: onnx.NodeProto) -> str:
    return "Cast" if node.op_type == "Cast" else node.domain or "ai.onnx"


def _element_type(graph: _Graph, node: onnx.NodeProto) -> str:
    if node.op_type == "Cast":
        return str(onnx.TensorProto.DataType.Name(node.attribute[0].i)).lower()
    if node.op_type in BLOCK_OPS:
        settings = (f"{a.name}={onnx.helper.get_attribute_value(a)!r}" for a in node.attribute)
        return f"{node.op_type}({', '.join(sorted(settings))})"
    if len(node.input) > 2 and node.input[2] in graph.stored:
        return graph.type_name(node.input[2])
    # Without a zero point, stored codes tell their own type; a Q node then makes uint8.
    return graph.type_name(node.input[0]) if node.op_type in DEQUANTIZE else "uint8"


def _axis(node: onnx.NodeProto) -> int:
    return next((int(a.i) for a in node.attribute if a.name == "axis"), 1)


Tensors = dict[str, QuantizedTensor]
Pair = tuple[QuantizedTensor, QuantizedTensor]

# Most reliable first. The last key is not unique: it needs equal numbers of tensors on both sides.
_KEYS: tuple[tuple[str, Callable[[QuantizedTensor], Hashable | None]], ...] = (
    ("producer node", lambda t: t.made_at if t.role == "activation" else None),
    ("consumer node", lambda t: t.read_at[0] if t.read_at else None),
    ("operator types and order", lambda t: (t.role, t.producer, t.consumers)),
)


def match(a: Tensors, b: Tensors) -> tuple[list[Pair], list[Renamed]]:
    """Pairs the tensors of two files; for those with different names also says how they were matched."""
    pairs = [(a[name], b[name]) for name in a if name in b]
    renamed: list[Renamed] = []
    left_a = [tensor for name, tensor in a.items() if name not in b]
    left_b = [tensor for name, tensor in b.items() if name not in a]
    for how, key in _KEYS:
        groups_a, groups_b = _grouped(left_a, key), _grouped(left_b, key)
        # In A's order, not in that of a set, so that the report does not change from run to run.
        for shared in groups_a:
            if len(groups_a[shared]) != len(groups_b.get(shared, ())):
                continue
            for one, other in zip(groups_a[shared], groups_b[shared], strict=True):
                pairs.append((one, other))
                renamed.append((one.name, other.name, how))
        done_a, done_b = {names[0] for names in renamed}, {names[1] for names in renamed}
        left_a = [tensor for tensor in left_a if tensor.name not in done_a]
        left_b = [tensor for tensor in left_b if tensor.name not in done_b]
    return pairs, sorted(renamed)


def _grouped(
    tensors: Iterable[QuantizedTensor], key: Callable[[QuantizedTensor], Hashable | None]
) -> dict[Hashable, list[QuantizedTensor]]:
    groups: dict[Hashable, list[QuantizedTensor]] = defaultdict(list)
    for tensor in tensors:
        value = key(tensor)
        if value is not None:
            groups[value].append(tensor)
    return groups


def _differences(a: QuantizedTensor, b: QuantizedTensor) -> Iterable[Difference]:
    """Compares one matched pair."""
    exact = (
        ("type", a.element_type, b.element_type),
        ("domain", f"Q {a.q_domain} DQ {a.dq_domain}", f"Q {b.q_domain} DQ {b.dq_domain}"),
        ("axis", str(a.axis), str(b.axis)),
        ("role", a.role, b.role),
    )
    for kind, one, other in exact:
        if one != other:
            yield Difference(kind, a.name, one, other)
    comparable = len(a.scale) == len(b.scale)
    same_scale = comparable and np.allclose(a.scale, b.scale, rtol=SCALE_TOLERANCE, atol=0)
    if not same_scale:
        yield Difference("scale", a.name, _numbers(a.scale), _numbers(b.scale) + _ratio(a.scale, b.scale))
    if set(a.zero_point) != set(b.zero_point) and a.element_type == b.element_type:
        yield Difference("zero point", a.name, _numbers(a.zero_point), _numbers(b.zero_point))
    if same_scale and a.codes is not None and b.codes is not None and a.codes.shape == b.codes.shape:
        gap = np.abs(a.codes.astype(np.int64) - b.codes.astype(np.int64))
        if gap.any():
            share = f"{100 * float((gap > 0).mean()):.2f} % of {gap.size} differ"
            yield Difference("codes", a.name, share, f"by at most {int(gap.max())}")


def _numbers(values: Sequence[float]) -> str:
    shown = ", ".join(f"{value:.7g}" for value in values[:3])
    return shown if len(values) <= 3 else f"{shown}, ... ({len(values)} values)"


def _ratio(a: Sequence[float], b: Sequence[float]) -> str:
    if len(a) != len(b) or not a or 0 in b:
        return ""
    ratios = np.asarray(a) / np.asarray(b)
    return f"  (A/B {ratios.min():.6g} to {ratios.max():.6g})"


def _operators(path: str | Path) -> Counter[str]:
    nodes = onnx.load(str(path), load_external_data=False).graph.node
    skipped = QUANTIZE | DEQUANTIZE | BLOCK_OPS | {"Constant"}
    return Counter(node.op_type for node in nodes if node.op_type not in skipped)


def compare_placement(path_a: str | Path, path_b: str | Path) -> PlacementDiff:
    """Compares two quantized files.

    Args:
        path_a: First file.
        path_b: Second file.

    Returns:
        Everything in which they differ.
    """
    a, b = extract(path_a), extract(path_b)
    pairs, renamed = match(a, b)
    known_a, known_b = {one.name for one, _ in pairs}, {other.name for _, other in pairs}
    count_a, count_b = _operators(path_a), _operators(path_b)
    return PlacementDiff(
        matched=len(pairs),
        renamed=tuple(renamed),
        only_a=tuple(tensor for name, tensor in a.items() if name not in known_a),
        only_b=tuple(tensor for name, tensor in b.items() if name not in known_b),
        differences=tuple(difference for pair in pairs for difference in _differences(*pair)),
        operators=tuple(
            (op, count_a[op], count_b[op]) for op in sorted(count_a | count_b) if count_a[op] != count_b[op]
        ),
    )


def render(diff: PlacementDiff, limit: int | None) -> str:
    """The comparison as text, with at most ``limit`` lines per group."""
    groups: list[tuple[str, list[str]]] = [
        ("operators (type: A, B)", [f"{op}: {a}, {b}" for op, a, b in diff.operators]),
        ("matched under another name", [f"{a} = {b}  [by {how}]" for a, b, how in diff.renamed]),
        ("only in A", [f"{tensor.name}: {tensor.describe()}" for tensor in diff.only_a]),
        ("only in B", [f"{tensor.name}: {tensor.describe()}" for tensor in diff.only_b]),
    ]
    for kind in sorted({d.kind for d in diff.differences}):
        groups.append((kind, [f"{d.name}: A {d.a} | B {d.b}" for d in diff.differences if d.kind == kind]))
    verdict = "no difference" if diff.same else "they differ"
    lines = [f"{diff.matched} tensors are quantized in both; {verdict}"]
    for title, entries in groups:
        if entries:
            shown = entries if limit is None else entries[:limit]
            hidden = len(entries) - len(shown)
            lines += [f"{title}: {len(entries)}", *(f"  {entry}" for entry in shown)]
            lines += [f"  ... {hidden} more (--all shows them)"] if hidden else []
    return "\n".join(lines)


def main() -> int:
    """Command line entry; returns the exit status."""
    parser = argparse.ArgumentParser(description="Compares where two quantized ONNX files quantize, and how.")
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    parser.add_argument("--all", action="store_true", help="show every entry of every group")
    args = parser.parse_args()
    diff = compare_placement(args.a, args.b)
    print(render(diff, None if args.all else 15))
    return 0 if diff.same else 1


if __name__ == "__main__":
    sys.exit(main())
