"""Positions of a finished XINT8 model against the NPU's shifters (Q06, Q07)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx_ir as ir

from roundel.model.graph import is_constant, only_reader, op_key
from roundel.qdq.read import StoredTensor
from roundel.rules.facts import Facts
from roundel.rules.patterns import is_gain, maker_of
from roundel.rules.types import Hit, Rule, Severity
from roundel.targets.npu import Format
from roundel.targets.operators import FUSING_CONSUMERS, POOLS
from roundel.targets.shifts import XINT8_LIMITS

_KEEPING = frozenset({"MaxPool", "AveragePool", "GlobalAveragePool", "Pad", "Slice"})
_CHAIN = 3  # activation and gain may follow before the pair does

Stored = Mapping[str, StoredTensor]
Reach = tuple[str, int, tuple[int, int]]


def _alignment(facts: Facts) -> Iterator[Hit]:
    for node, stored in _nodes(facts):
        op = op_key(node)
        if op not in _KEEPING and op != "Concat":
            continue
        sources = node.inputs if op == "Concat" else node.inputs[:1]
        before = [_input(value, stored) for value in sources]
        after = _output(node, stored)
        known = [position for position in (*before, after) if position is not None]
        if len(set(known)) > 1:
            words = ", ".join("?" if position is None else str(position) for position in before)
            yield Hit(Severity.ERROR, f"{op} from positions {words} to {after}", str(node.name))


def _shifts(facts: Facts) -> Iterator[Hit]:
    for node, stored in _nodes(facts):
        for name, value, (low, high) in _reaches(node, stored):
            if not low <= value <= high:
                yield Hit(Severity.ERROR, f"{name} {value}, allowed {low} to {high}", str(node.name))


def _reaches(node: ir.Node, stored: Stored) -> Iterator[Reach]:
    op, out = op_key(node), _output(node, stored)
    if op in ("Conv", "Gemm"):
        yield from _layer(node, stored, out)
    elif op in ("Add", "Sub", "Mul") and not is_gain(node):
        yield from _elementwise(node, stored, out)
    elif op == "HardSigmoid":
        yield from _hard_sigmoid(node, stored, out)


def _layer(node: ir.Node, stored: Stored, out: int | None) -> Iterator[Reach]:
    data, weight = _input(node.inputs[0], stored), _input(node.inputs[1], stored)
    if data is None or weight is None or out is None:
        return
    cut = weight + data - out
    yield "shift_cut", cut, XINT8_LIMITS.cut
    bias = _input(node.inputs[2], stored) if len(node.inputs) > 2 else None
    if bias is not None:
        reader = only_reader(node.outputs[0])
        leaky = reader is not None and op_key(reader) == "LeakyRelu"
        yield "shift_bias", weight + data - bias, XINT8_LIMITS.bias(cut, leaky=leaky)


def _elementwise(node: ir.Node, stored: Stored, out: int | None) -> Iterator[Reach]:
    found = [_input(value, stored) for value in node.inputs]
    inputs = [position for position in found if position is not None]
    if len(inputs) != len(found) or len(inputs) < 2:
        return
    if op_key(node) == "Mul":
        swish = any(_gates(value, node) for value in node.inputs)
        limits = XINT8_LIMITS.swish if swish else XINT8_LIMITS.mul_write
        if out is not None:
            yield "shift_swish" if swish else "shift_write", sum(inputs) - out, limits
        return
    yield "shift_read", max(inputs) - min(inputs), (0, XINT8_LIMITS.read)
    if out is not None and op_key(node) == "Add":
        yield "shift_write", min(inputs) - out, XINT8_LIMITS.add_write


def _gates(value: ir.Value | None, product: ir.Node) -> bool:
    """Whether the product multiplies a tensor by its own HardSigmoid."""
    if value is None:
        return False
    readers = {op_key(node) for node in value.consumers() if node is not product}
    return "HardSigmoid" in readers


def _hard_sigmoid(node: ir.Node, stored: Stored, out: int | None) -> Iterator[Reach]:
    data = _input(node.inputs[0], stored)
    if data is None or out is None:
        return
    yield "HardSigmoid input position", data, XINT8_LIMITS.hard_sigmoid_input
    high = data + XINT8_LIMITS.hard_sigmoid_reach
    yield "HardSigmoid output position", out, (XINT8_LIMITS.hard_sigmoid_output, high)


def _nodes(facts: Facts) -> Iterator[tuple[ir.Node, Stored]]:
    if facts.stored is not None and facts.format is Format.XINT8:
        for node in facts.given.graph:
            yield node, facts.stored.tensors


def _input(value: ir.Value | None, stored: Stored) -> int | None:
    """The position of what a node reads, looking back through a Pad that has no pair of its own."""
    if value is None:
        return None
    tensor = stored.get(str(value.name))
    if tensor is None and not is_constant(value):
        maker = value.producer()
        if maker is not None and op_key(maker) == "Pad":
            return _input(maker.inputs[0], stored)
    return None if tensor is None else tensor.position


def _output(node: ir.Node, stored: Stored) -> int | None:
    """The position of a node's result, looking on through activations and gains that share its pair."""
    value = node.outputs[0]
    for _ in range(_CHAIN):
        tensor = stored.get(str(value.name))
        if tensor is not None:
            return tensor.position
        reader = only_reader(value)
        if reader is None or maker_of(reader) is not value.producer():
            return None
        onward = op_key(reader) in FUSING_CONSUMERS or is_gain(reader)
        if not onward and not (op_key(node) == "Pad" and op_key(reader) in POOLS):
            return None
        value = reader.outputs[0]
    return None


POSITION_RULES = (
    Rule(
        "Q06",
        "uneven scales",
        "Concat, pools, Pad and Slice copy codes: inputs and output must share one scale.",
        "Align them (placement.align_concat, align_pool, align_pad, align_slice); preset xint8 does.",
        _alignment,
    ),
    Rule(
        "Q07",
        "shift limits",
        "The NPU's shifters reach only so far; beyond them the compiler refuses or the result is wrong.",
        "Move the scales within reach (recipe section npu); preset xint8 does.",
        _shifts,
    ),
)
