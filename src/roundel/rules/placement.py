"""Where nodes are expected to run: the patterns that decide, and the islands of those on the NPU."""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from roundel.model import graph
from roundel.passes import refresh_shapes
from roundel.passes.activations import is_depthwise
from roundel.qdq.read import PAIRS, is_gain
from roundel.rules import phoenix_places
from roundel.rules.phoenix_places import Refused
from roundel.rules.types import NodePlace, Place, Prediction
from roundel.targets import operators
from roundel.targets.npu import MINIMUM_CONVS, Compiler, Device, Format, refusal


def close_batch(model: ir.Model) -> None:
    """Set open batch axes to 1, in place, and infer the other shapes from there."""
    for value in model.graph.inputs:
        if value.shape is not None and len(value.shape) > 0 and not isinstance(value.shape[0], int):
            value.shape = ir.Shape([1, *list(value.shape)[1:]])
    refresh_shapes(model)


def node_macs(node: ir.Node) -> int | None:
    """Multiply-accumulates of one inference; 0 for operators without, None where a shape is open."""
    op = graph.op_key(node)
    if op not in operators.LAYERS:
        return 0
    left, right, out = map(graph.static_shape, (*node.inputs[:2], node.outputs[0]))
    if left is None or right is None or out is None:
        return None
    if op == "Conv":
        return math.prod(out) * math.prod(right[1:])
    if op == "ConvTranspose":
        return math.prod(left) * math.prod(right[1:])
    if op == "Gemm":
        return math.prod(out) * left[0 if graph.attribute_int(node, "transA", 0) else 1]
    return math.prod(out) * left[-1]


_SHUFFLE_RANK = 5
_ACTIVATIONS = ("Relu", "Clip")


def maker_of(node: ir.Node, index: int = 0) -> ir.Node | None:
    """The node that makes one of the inputs."""
    value = node.inputs[index] if index < len(node.inputs) else None
    return None if value is None else value.producer()


def conv_before(node: ir.Node) -> ir.Node | None:
    """The Conv whose result only this activation reads."""
    maker = maker_of(node) if graph.op_key(node) in _ACTIVATIONS else None
    if maker is None or graph.op_key(maker) != "Conv" or graph.only_reader(maker.outputs[0]) is not node:
        return None
    return maker


def activation_behind(conv: ir.Node) -> ir.Node | None:
    """The Relu or Clip that alone reads the Conv."""
    reader = graph.only_reader(conv.outputs[0])
    return reader if reader is not None and graph.op_key(reader) in _ACTIVATIONS else None


def channel_shuffle(transpose: ir.Node) -> tuple[ir.Node, ir.Node, ir.Node] | None:
    """Reshape to 5-D, Transpose, Reshape back, named by its Transpose."""
    if graph.op_key(transpose) != "Transpose":
        return None
    first, last = maker_of(transpose), graph.only_reader(transpose.outputs[0])
    if first is None or last is None or {graph.op_key(first), graph.op_key(last)} != {"Reshape"}:
        return None
    if graph.rank(transpose.outputs[0]) != _SHUFFLE_RANK or graph.rank(last.outputs[0]) == _SHUFFLE_RANK:
        return None
    return first, transpose, last


def norm_after_concat(node: ir.Node) -> ir.Node | None:
    """The Concat that a BatchNormalization reads."""
    maker = maker_of(node) if graph.op_key(node) == "BatchNormalization" else None
    return maker if maker is not None and graph.op_key(maker) == "Concat" else None


def open_sides(node: ir.Node, stored: Container[str]) -> list[str]:
    """Float tensors around the node that are stored as float and that no fusion hides."""
    found = [str(value.name) for value in _data_inputs(node) if not _input_closed(node, value, stored)]
    for value in node.outputs:
        if _is_float(value) and value.name not in stored and not _fused_onward(value, node):
            found.append(str(value.name))
    return found


def fused_maker(node: ir.Node, stored: Container[str]) -> ir.Node | None:
    """The node before, where no pair stands between the two because they compute as one."""
    value = node.inputs[0] if node.inputs else None
    maker = None if value is None or value.name in stored else value.producer()
    return maker if maker is not None and value is not None and _fused_onward(value, maker) else None


def _data_inputs(node: ir.Node) -> list[ir.Value]:
    rule = operators.OPERATORS.get(node.op_type)
    if rule is None or not rule.sets:
        indices: tuple[int, ...] = (0,)
    elif rule.data == operators.EVERY_INPUT:
        indices = tuple(range(len(node.inputs)))
    else:
        indices = (*rule.data, *rule.weights)
    values = [node.inputs[index] for index in indices if index < len(node.inputs)]
    return [value for value in values if value is not None and _is_float(value)]


def _input_closed(node: ir.Node, value: ir.Value, stored: Container[str]) -> bool:
    if value.name in stored:
        return True
    if graph.is_constant(value):
        return is_gain(node)
    maker = value.producer()
    return maker is not None and _fused_onward(value, maker)


def _fused_onward(value: ir.Value, maker: ir.Node) -> bool:
    """Whether the maker and the one reader of a value compute as one."""
    reader = graph.only_reader(value)
    if reader is None:
        return False
    if maker.op_type == "Pad":
        return reader.op_type in operators.AVERAGE_POOLS
    if is_gain(reader):
        return True
    return maker.op_type in operators.FUSING_PRODUCERS and reader.op_type in operators.FUSING_CONSUMERS


def _is_float(value: ir.Value) -> bool:
    return value.dtype in graph.FLOAT_TYPES


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


_SKIPPED = PAIRS | {"Constant"}


@dataclass(frozen=True, slots=True)
class Situation:
    """What decides a node's place besides the graph.

    Attributes:
        format: the number format.
        device: the device.
        stored: names of tensors held in integers; None where the compiler converts by itself (BF16).
        relus: names of Clips that have become Relu.
        whole: why the compiler takes nothing of this graph.
        shifts: names of layers whose shifts it does not take.
        batch: rows that the file fixes; 1 where it leaves them open.
    """

    format: Format
    device: Device
    stored: Container[str] | None
    relus: frozenset[str] = frozenset()
    whole: Refused | None = None
    shifts: frozenset[str] = frozenset()
    batch: int = 1

    @property
    def first(self) -> bool:
        """Whether the compiler is the first NPU's, which has verdicts of its own."""
        return self.device.compiler is Compiler.X1


def predict(prepared: ir.Graph, situation: Situation) -> Prediction:
    """Place every node of a prepared float graph, in execution order."""
    nodes = [node for node in prepared if graph.op_key(node) not in _SKIPPED]
    verdicts = _verdicts(nodes, situation)
    islands = number_islands(nodes, {node for node in nodes if verdicts[node] is None})
    return Prediction(tuple(_placed(node, verdicts[node], islands.get(node)) for node in nodes))


def _placed(node: ir.Node, verdict: Refused | None, island: int | None) -> NodePlace:
    place = Place.NPU if verdict is None else Place.CPU
    rule, reason = (None, "") if verdict is None else (verdict.rule, verdict.reason)
    return NodePlace(str(node.name), graph.op_key(node), place, rule, reason, node_macs(node), island)


def _verdicts(nodes: list[ir.Node], situation: Situation) -> dict[ir.Node, Refused | None]:
    if situation.format not in situation.device.formats:
        refused = f"{situation.device.name} does not take {situation.format.value}"
        return dict.fromkeys(nodes, Refused("P19", refused))
    if situation.whole is not None:
        return dict.fromkeys(nodes, situation.whole)
    if situation.first and situation.batch > 1:
        return phoenix_places.with_batch(nodes, situation.batch)
    convs = sum(1 for node in nodes if graph.op_key(node) == "Conv")
    if situation.format.integer and not situation.first and convs < MINIMUM_CONVS:
        few = Refused("P04", f"the graph has {convs} Conv, the integer compiler wants {MINIMUM_CONVS}")
        return dict.fromkeys(nodes, few)
    if situation.first and situation.stored is not None:
        stored = situation.stored
        ejected = phoenix_places.ejection(nodes, {node for node in nodes if open_sides(node, stored)})
        if ejected is not None:
            return dict.fromkeys(nodes, ejected)
    found = {node: _verdict(node, situation) for node in nodes}
    _together(nodes, found, situation)
    return found


def _together(nodes: list[ir.Node], found: dict[ir.Node, Refused | None], situation: Situation) -> None:
    """Nodes without a Q/DQ pair between them have one place: a node on the CPU takes the others along."""
    if situation.stored is None:
        return
    fused = [(maker, node) for node in nodes if (maker := fused_maker(node, situation.stored)) in found]
    for maker, node in fused:
        found[node] = found[node] or found[maker]
    for maker, node in reversed(fused):
        found[maker] = found[maker] or found[node]


def _verdict(node: ir.Node, situation: Situation) -> Refused | None:
    op, kind, compiler = graph.op_key(node), situation.format, situation.device.compiler
    if graph.has_subgraph(node):
        return Refused("P05", "control flow")
    values = [value for value in (*node.inputs[:1], *node.outputs) if value is not None]
    if op in ("Shape", "Size") or not any(v.dtype in graph.FLOAT_TYPES or v.dtype is None for v in values):
        return Refused("P02", "computes integers (shapes), not data")
    if kind.integer and _shuffles(node):
        return Refused("P10", "part of a 5-D channel shuffle")
    if kind.integer and norm_after_concat(node) is not None:
        return Refused("P11", "BatchNormalization behind Concat")
    if situation.first:
        known = phoenix_places.refusal_of(node)
        if known is None and node.name in situation.shifts:
            known = Refused("Q07", "shift_cut outside 0 to 16")
        if known is not None:
            return known
    reason = refusal(op, kind, compiler)
    if reason is not None:
        return Refused("P09" if op in operators.GATES else "P12", reason)
    sides = [] if situation.stored is None else open_sides(node, situation.stored)
    if sides:
        return Refused("Q05", f"no Q/DQ on {', '.join(sides[:2])}")
    return _conv_and_activation(node, situation) if compiler is Compiler.X2 else None


def _shuffles(node: ir.Node) -> bool:
    reader = graph.only_reader(node.outputs[0]) if node.outputs else None
    around = [each for each in (node, reader, maker_of(node)) if each is not None]
    return any(part is node for each in around for part in channel_shuffle(each) or ())


def _conv_and_activation(node: ir.Node, situation: Situation) -> Refused | None:
    """What AMD's logs of the X2 compiler show.

    18 ordinary pairs of mobilenet_v2 with Clip ran on the CPU in XINT8 and A8W8, 17 depthwise ones did not.
    In XINT8, depthwise pairs with Relu explain the last 3 islands of mobilenet_v3_small and all 62 cuts of
    densenet121.
    """
    conv, activation = (
        (node, activation_behind(node)) if graph.op_key(node) == "Conv" else (conv_before(node), node)
    )
    if conv is None or activation is None or situation.format not in (Format.XINT8, Format.A8W8):
        return None
    relu = graph.op_key(activation) == "Relu" or activation.name in situation.relus
    if not relu and not is_depthwise(conv):
        return Refused("P08", "Conv + Clip: this compiler takes the pair only for depthwise Conv")
    if relu and is_depthwise(conv) and situation.format is Format.XINT8:
        return Refused("P08", "depthwise Conv + Relu: on the CPU in AMD's XINT8 logs")
    return None
