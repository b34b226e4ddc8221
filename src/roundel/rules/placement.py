"""NPU nodes as groups, none of which data leaves and enters again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from roundel.model.graph import FLOAT_TYPES, has_subgraph, only_reader, op_key
from roundel.qdq.read import PAIRS
from roundel.rules import patterns
from roundel.rules.types import NodePlace, Place, Prediction
from roundel.targets.npu import MINIMUM_CONVS, Compiler, Device, Format, refusal
from roundel.targets.operators import GATES


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
class Verdict:
    """Why a node goes to the CPU."""

    rule: str
    reason: str


@dataclass(frozen=True, slots=True)
class Situation:
    """What decides a node's place besides the graph.

    Attributes:
        format: the number format.
        device: the device.
        stored: names of tensors held in integers; None where the compiler converts by itself (BF16).
        relus: names of Clips that have become Relu.
    """

    format: Format
    device: Device
    stored: Container[str] | None
    relus: frozenset[str] = frozenset()

    def acts_as_relu(self, node: ir.Node) -> bool:
        """Relu, or a Clip that has become one."""
        return op_key(node) == "Relu" or node.name in self.relus


def predict(graph: ir.Graph, situation: Situation) -> Prediction:
    """Place every node of a prepared float graph, in execution order."""
    nodes = [node for node in graph if op_key(node) not in _SKIPPED]
    verdicts = _verdicts(nodes, situation)
    islands = number_islands(nodes, {node for node in nodes if verdicts[node] is None})
    return Prediction(tuple(_placed(node, verdicts[node], islands.get(node)) for node in nodes))


def _placed(node: ir.Node, verdict: Verdict | None, island: int | None) -> NodePlace:
    place = Place.NPU if verdict is None else Place.CPU
    rule, reason = (None, "") if verdict is None else (verdict.rule, verdict.reason)
    return NodePlace(str(node.name), op_key(node), place, rule, reason, patterns.node_macs(node), island)


def _verdicts(nodes: list[ir.Node], situation: Situation) -> dict[ir.Node, Verdict | None]:
    if situation.format not in situation.device.formats:
        refused = f"{situation.device.name} does not take {situation.format.value}"
        return dict.fromkeys(nodes, Verdict("P19", refused))
    convs = sum(1 for node in nodes if op_key(node) == "Conv")
    if situation.format.integer and convs < MINIMUM_CONVS:
        few = Verdict("P04", f"the graph has {convs} Conv, the integer compiler wants {MINIMUM_CONVS}")
        return dict.fromkeys(nodes, few)
    found = {node: _verdict(node, situation) for node in nodes}
    _together(nodes, found, situation)
    return found


def _together(nodes: list[ir.Node], found: dict[ir.Node, Verdict | None], situation: Situation) -> None:
    """Nodes without a Q/DQ pair between them have one place: a node on the CPU takes the others along."""
    if situation.stored is None:
        return
    fused = [
        (maker, node) for node in nodes if (maker := patterns.fused_maker(node, situation.stored)) in found
    ]
    for maker, node in fused:
        found[node] = found[node] or found[maker]
    for maker, node in reversed(fused):
        found[maker] = found[maker] or found[node]


def _verdict(node: ir.Node, situation: Situation) -> Verdict | None:
    for test in _TESTS:
        verdict = test(node, situation)
        if verdict is not None:
            return verdict
    return None


def _control_flow(node: ir.Node, _: Situation) -> Verdict | None:
    return Verdict("P05", "control flow") if has_subgraph(node) else None


def _shape_arithmetic(node: ir.Node, _: Situation) -> Verdict | None:
    values = [value for value in (*node.inputs[:1], *node.outputs) if value is not None]
    data = any(value.dtype in FLOAT_TYPES or value.dtype is None for value in values)
    if data and op_key(node) not in ("Shape", "Size"):
        return None
    return Verdict("P02", "computes integers (shapes), not data")


def _outside_table(node: ir.Node, situation: Situation) -> Verdict | None:
    op, kind = op_key(node), situation.format
    reason = refusal(op, kind, situation.device.compiler)
    return None if reason is None else Verdict("P09" if op in GATES else "P12", reason)


def _open(node: ir.Node, situation: Situation) -> Verdict | None:
    if situation.stored is None:
        return None
    sides = patterns.open_sides(node, situation.stored)
    return Verdict("Q05", f"no Q/DQ on {', '.join(sides[:2])}") if sides else None


def _conv_and_clip(node: ir.Node, situation: Situation) -> Verdict | None:
    """18 ordinary pairs of mobilenet_v2 ran on the CPU in XINT8 and A8W8, its 17 depthwise ones did not."""
    if situation.format not in (Format.XINT8, Format.A8W8) or situation.device.compiler is not Compiler.X2:
        return None
    conv, activation = _pair(node)
    if conv is None or activation is None or op_key(activation) != "Clip" or patterns.is_depthwise(conv):
        return None
    if situation.acts_as_relu(activation):
        return None
    return Verdict("P08", "Conv + Clip: this compiler takes the pair only for depthwise Conv")


def _depthwise_and_relu(node: ir.Node, situation: Situation) -> Verdict | None:
    """Explains the last 3 islands of mobilenet_v3_small and all 62 cuts of densenet121 in XINT8."""
    if situation.format is not Format.XINT8 or situation.device.compiler is not Compiler.X2:
        return None
    conv, activation = _pair(node)
    if conv is None or activation is None or not patterns.is_depthwise(conv):
        return None
    if not situation.acts_as_relu(activation):
        return None
    return Verdict("P08", "depthwise Conv + Relu: on the CPU in AMD's XINT8 logs")


def _pair(node: ir.Node) -> tuple[ir.Node | None, ir.Node | None]:
    """The Conv and its activation, whichever of the two the node is."""
    if op_key(node) == "Conv":
        return node, patterns.activation_behind(node)
    if op_key(node) in ("Relu", "Clip"):
        return patterns.conv_before(node), node
    return None, None


def _shuffle(node: ir.Node, situation: Situation) -> Verdict | None:
    if not situation.format.integer:
        return None
    reader = only_reader(node.outputs[0]) if node.outputs else None
    for candidate in (node, reader, patterns.maker_of(node)):
        found = None if candidate is None else patterns.channel_shuffle(candidate)
        if found is not None and any(part is node for part in found):
            return Verdict("P10", "part of a 5-D channel shuffle")
    return None


def _norm(node: ir.Node, situation: Situation) -> Verdict | None:
    if situation.format.integer and patterns.norm_after_concat(node) is not None:
        return Verdict("P11", "BatchNormalization behind Concat")
    return None


_TESTS: tuple[Callable[[ir.Node, Situation], Verdict | None], ...] = (
    _control_flow,
    _shape_arithmetic,
    _shuffle,
    _norm,
    _outside_table,
    _open,
    _conv_and_clip,
    _depthwise_and_relu,
)
