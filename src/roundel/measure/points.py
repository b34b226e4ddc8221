"""AMD's own operators: block formats, which store and restore a tensor in one node, and wide pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from roundel.measure.match import Matches, cut_to
from roundel.measure.types import Place
from roundel.model.graph import has_subgraph, is_constant, op_key, values_by_name
from roundel.model.session import open_session
from roundel.qdq.names import QUARK
from roundel.qdq.read import (
    restored,
    source_of,
    stores,
)
from roundel.targets.operators import FUSING_CONSUMERS, Trait, ops_with


def with_plain_constants(model: ir.Model) -> ir.Model:
    """A copy in which what AMD's operators make of constants is a constant itself.

    Their bodies are long, and ONNX Runtime takes minutes to load hundreds of them.
    """
    copy = model.clone()
    graph = copy.graph
    fixed: set[ir.Value] = set()
    for node in graph:
        if node.domain == QUARK and all(v is None or is_constant(v) or v in fixed for v in node.inputs):
            fixed.update(node.outputs)
    read = [value for value in fixed if any(use.node.outputs[0] not in fixed for use in value.uses())]
    if not read:
        return copy
    names = [str(value.name) for value in read]
    inputs = {str(value.name) for value in graph.inputs}
    arrays = open_session(cut_to(model, names, drop_inputs=inputs), simulate=True).run(names, {})
    for value, name, array in zip(read, names, arrays, strict=True):
        constant = ir.Value(
            name=f"roundel_constant:{name}",
            shape=ir.Shape(array.shape),
            type=ir.TensorType(ir.DataType.FLOAT),
            const_value=ir.tensor(array, name=f"roundel_constant:{name}"),
        )
        graph.register_initializer(constant)
        ir.convenience.replace_all_uses_with(value, constant, replace_graph_outputs=True)
    graph.remove([node for node in graph if fixed.issuperset(node.outputs) and node.outputs])
    return copy


LAYER_OPS = ops_with(Trait.LAYER | Trait.RECURRENT)
_CHANNELS_SECOND = frozenset({"Conv", "ConvTranspose", "BatchNormalization", "InstanceNormalization"})


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """One tensor to compare.

    Attributes:
        partner: the tensor of the float graph.
        raw: the tensor of the quantized graph, before its quantizer.
        shown: the same as its readers see it: behind its Q/DQ pair, or `raw` itself.
        place: graph input, graph output, or inside.
        node: name of the main node of its layer in the float graph, "" for an input.
        op: its operator, "Input" for an input.
        nodes: names of the layer's nodes in the quantized graph, without Q/DQ.
        sources: float names of the points that the layer reads.
    """

    partner: ir.Value
    raw: ir.Value
    shown: ir.Value
    place: Place
    node: str = ""
    op: str = "Input"
    nodes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """In the float model."""
        return str(self.partner.name)

    @property
    def quantized(self) -> bool:
        """Whether a quantizer stands behind it."""
        return self.shown is not self.raw

    def channel_axis(self, rank: int) -> int | None:
        """Where its channels are."""
        return channel_axis(self.op, rank)


def channel_axis(op: str, rank: int) -> int | None:
    """Where the channels of a layer's output are, by the habits of its operator and rank."""
    if rank < 2:
        return None
    return 1 if rank in (2, 4, 5) or op in _CHANNELS_SECOND else rank - 1


def find_points(quantized: ir.Model, matches: Matches) -> tuple[Point, ...]:
    """The points, in graph order.

    Args:
        quantized: the quantized model, with its Q/DQ pairs.
        matches: partners of its tensors.
    """
    values = values_by_name(quantized.graph)
    found = {}
    for name, partner in matches.tensors.items():
        raw = values[name]
        shown = _shown(raw, quantized.graph)
        if shown is not raw or not (raw.is_graph_input() or _inside_layer(raw, matches)):
            found[raw] = Point(partner, raw, shown, _place(partner))
    order = {value: number for number, value in enumerate(values.values())}
    ranked = sorted(found.values(), key=lambda point: order[point.raw])
    return tuple(_with_layer(point, found, matches) for point in ranked)


def _restored(value: ir.Value) -> Iterator[ir.Value]:
    """What the pairs right behind a tensor make of it."""
    for use in value.uses():
        behind = [second.node for second in use.node.outputs[0].uses()] if use.node.outputs else []
        for node in (use.node, *behind):
            if restored(node) is value:
                yield node.outputs[0]


def _shown(raw: ir.Value, graph: ir.Graph) -> ir.Value:
    for value in graph.outputs:
        if value is not raw and source_of(value) is raw:
            return value
    return next(_restored(raw), raw)


def _inside_layer(raw: ir.Value, matches: Matches) -> bool:
    """Between a layer and its activation: the error shows behind the activation."""
    uses = raw.uses()
    if raw.is_graph_input() or raw.is_graph_output() or len(uses) != 1:
        return False
    reader = next(iter(uses)).node
    return op_key(reader) in FUSING_CONSUMERS and str(reader.outputs[0].name) in matches.tensors


def _place(partner: ir.Value) -> Place:
    if partner.is_graph_input():
        return "input"
    return "output" if partner.is_graph_output() else "inside"


def _with_layer(point: Point, points: Mapping[ir.Value, Point], matches: Matches) -> Point:
    """The point with what computes it: everything back to the points before."""
    if point.place == "input":
        return point
    nodes: list[ir.Node] = []
    sources: dict[str, None] = {}
    pending, seen = [point.raw], {point.raw}
    while pending:
        maker = pending.pop().producer()
        if maker is None:
            continue
        if not stores(maker):
            nodes.append(maker)
        for value in maker.inputs:
            origin = None if value is None else source_of(value)
            if origin is None or origin in seen:
                continue
            seen.add(origin)
            if origin in points:
                sources[points[origin].name] = None
            else:
                pending.append(origin)
    main = _main(nodes)
    twin = matches.nodes.get(str(main.name)) if main is not None else None
    maker = twin or point.partner.producer()
    return replace(
        point,
        node=str(maker.name) if maker is not None else "",
        op=op_key(maker) if maker is not None else "",
        nodes=tuple(str(node.name) for node in reversed(nodes)),
        sources=tuple(sources),
    )


def _main(nodes: Sequence[ir.Node]) -> ir.Node | None:
    """The node that a layer is named after: the last with weights, else the last that is no activation."""
    for test in (LAYER_OPS, None):
        for node in nodes:
            if op_key(node) in test if test else op_key(node) not in FUSING_CONSUMERS:
                return node
    return nodes[0] if nodes else None


def unusual(node: ir.Node) -> bool:
    """Whether a node cannot be computed a second time on other inputs: it has a body of its own."""
    return has_subgraph(node)
