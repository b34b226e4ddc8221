"""The tensors to compare, what computes each of them, and the model that gives all their values at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from roundel.measure.reference import Matches, fixed_values
from roundel.measure.types import Place
from roundel.model.edit import add_constant
from roundel.model.graph import has_subgraph, is_constant, only_reader, op_key, values_by_name
from roundel.qdq.nodes import QUARK
from roundel.qdq.read import restored, source_of, stores
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
    for value, name, array in zip(read, names, fixed_values(model, names), strict=True):
        constant = add_constant(graph, f"roundel_constant:{name}", array)
        ir.convenience.replace_all_uses_with(value, constant, replace_graph_outputs=True)
    graph.remove([node for node in graph if fixed.issuperset(node.outputs) and node.outputs])
    return copy


LAYER_OPS = ops_with(Trait.LAYER | Trait.RECURRENT)
_CHANNELS_SECOND = frozenset({"Conv", "ConvTranspose", "BatchNormalization", "InstanceNormalization"})


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """One tensor to compare.

    Attributes:
        name: of the tensor in the float graph.
        raw: of the tensor in the quantized graph, before its quantizer.
        shown: the same as its readers see it: behind its Q/DQ pair, or `raw` itself.
        place: graph input, graph output, or inside.
        node: name of the main node of its layer in the float graph, "" for an input.
        op: its operator, "Input" for an input.
        nodes: names of the layer's nodes in the quantized graph, without Q/DQ.
        sources: float names of the points that the layer reads.
    """

    name: str
    raw: str
    shown: str
    place: Place
    node: str = ""
    op: str = "Input"
    nodes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()


def output_channel_axis(op: str, rank: int) -> int | None:
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
    found = {}
    for name, raw in values_by_name(quantized.graph).items():
        partner = matches.tensors.get(name)
        if partner is None:
            continue
        shown = _shown(raw, quantized.graph)
        if shown is not raw or not (raw.is_graph_input() or _inside_layer(raw, matches)):
            ends: Place = "output" if partner.is_graph_output() else "inside"
            place = "input" if partner.is_graph_input() else ends
            found[raw] = Point(str(partner.name), name, str(shown.name), place)
    return tuple(_with_layer(point, raw, found, matches) for raw, point in found.items())


def _restored(value: ir.Value) -> Iterator[ir.Value]:
    """What the pairs right behind a tensor make of it."""
    for use in value.uses():
        behind = [second.node for second in use.node.outputs[0].uses()] if use.node.outputs else []
        for node in (use.node, *behind):
            if restored(node) is value:
                yield node.outputs[0]


def _shown(raw: ir.Value, graph: ir.Graph) -> ir.Value:
    shown = (value for value in graph.outputs if value is not raw and source_of(value) is raw)
    return next(itertools.chain(shown, _restored(raw)), raw)


def _inside_layer(raw: ir.Value, matches: Matches) -> bool:
    """Between a layer and its activation: the error shows behind the activation."""
    reader = only_reader(raw)
    fuses = reader is not None and op_key(reader) in FUSING_CONSUMERS
    return reader is not None and fuses and str(reader.outputs[0].name) in matches.tensors


def _with_layer(point: Point, raw: ir.Value, points: Mapping[ir.Value, Point], matches: Matches) -> Point:
    """The point with what computes it: everything back to the points before."""
    if point.place == "input":
        return point
    nodes: list[ir.Node] = []
    sources: dict[str, None] = {}
    pending, seen = [raw], {raw}
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
    maker = twin or matches.tensors[point.raw].producer()
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


_FEED, _SHADOW, _STORED = "roundel_float:", "roundel_shadow:", "roundel_stored:"


@dataclass(frozen=True, slots=True)
class Fetch:
    """The names under which one point's tensors come out of the extended model.

    Attributes:
        feed: the graph input that takes the float tensor.
        shown: as the quantized model's layers read it.
        shadow: from float inputs; None where it cannot be computed.
        stored: the float tensor, stored; None where the point is not quantized.
    """

    feed: str
    shown: str
    shadow: str | None
    stored: str | None


def extend(quantized: ir.Model, points: Sequence[Point]) -> tuple[ir.Model, dict[str, Fetch]]:
    """The quantized model with a shadow, and where to find each point's tensors, by the point's name.

    Every layer is there a second time, on the float model's tensors. One run then gives, for each point, what
    the quantized model computes (`shown`), what the layer alone makes of float inputs (`shadow`), and the
    float tensor stored as the quantized model stores it (`stored`). The model passed in is not changed.
    """
    model = quantized.clone()
    return model, _Builder(model, points).fetches()


class _Builder:
    def __init__(self, model: ir.Model, points: Sequence[Point]) -> None:
        self.graph = model.graph
        values = values_by_name(model.graph)
        self.points = {values[p.raw]: p for p in points}
        self.shown = {p.name: values[p.shown] for p in points}
        self.feeds: dict[ir.Value, ir.Value] = {}
        self.shadows: dict[ir.Value, ir.Value] = {}
        self.fixed: set[ir.Value] = set()  # computed from constants alone: shared, not doubled
        self.lost: set[ir.Value] = set()  # cannot be doubled

    def fetches(self) -> dict[str, Fetch]:
        for raw, point in self.points.items():
            feed = ir.Value(name=_FEED + point.name, type=ir.TensorType(ir.DataType.FLOAT))
            self.graph.inputs.append(feed)
            self.feeds[raw] = feed
            if raw.is_graph_input():
                self.shadows[raw] = feed
        for node in list(self.graph):
            self._double(node)
        fetches = {}
        for raw, point in self.points.items():
            shown = self.shown[point.name]
            stored = self._stored(raw, shown)
            # Where nothing before a tensor has a partner, it is its own double.
            double = None if shown in self.lost else self.shadows.get(shown, shown)
            shadow = stored if raw.is_graph_input() else double
            fetches[point.name] = Fetch(
                feed=str(self.feeds[raw].name),
                shown=self._output(shown),
                shadow=None if shadow is None else self._output(shadow),
                stored=None if stored is None else self._output(stored),
            )
        return fetches

    def _double(self, node: ir.Node) -> None:
        """Compute the node again from the float tensors, unless it has nothing to do with them.

        A node with a body of its own cannot be computed a second time on other inputs.
        """
        inputs = [value for value in node.inputs if value is not None]
        if all(is_constant(value) or value in self.fixed for value in inputs) and not has_subgraph(node):
            self.fixed.update(node.outputs)
            return
        mapped = [None if value is None else self._seen_by(node, value) for value in node.inputs]
        if has_subgraph(node) or any(value in self.lost for value in mapped if value is not None):
            self.lost.update(node.outputs)
            return
        if all(new is old for new, old in zip(mapped, node.inputs, strict=True)):
            return  # reads no tensor with a partner: the same in both
        twin = self._copy(node, mapped)
        for old, new in zip(node.outputs, twin.outputs, strict=True):
            self.shadows[old] = new

    def _seen_by(self, node: ir.Node, value: ir.Value) -> ir.Value:
        """What the node's double reads: of a point, the float tensor; a point's own quantizer, the shadow."""
        origin = source_of(value)
        if origin in self.points and not stores(node):
            return self.feeds[origin]
        return self.shadows.get(value, value)

    def _stored(self, raw: ir.Value, shown: ir.Value) -> ir.Value | None:
        """The float tensor behind copies of the nodes between a tensor and its restored form."""
        chain: list[ir.Node] = []
        value = shown
        while value is not raw:
            maker = value.producer()
            assert maker is not None
            assert maker.inputs[0] is not None
            chain.append(maker)
            value = maker.inputs[0]
        current = self.feeds[raw]
        for node in reversed(chain):
            current = self._copy(node, [current, *node.inputs[1:]], _STORED).outputs[0]
        return current if chain else None

    def _copy(self, node: ir.Node, inputs: list[ir.Value | None], prefix: str = _SHADOW) -> ir.Node:
        twin = ir.Node(
            node.domain,
            node.op_type,
            inputs,
            list(node.attributes.values()),
            overload=node.overload,
            num_outputs=len(node.outputs),
            name=f"{prefix}{node.name}",
            version=node.version,
        )
        for old, new in zip(node.outputs, twin.outputs, strict=True):
            new.name = f"{prefix}{old.name}" if old.name else ""
            new.type = old.type
        self.graph.append(twin)
        return twin

    def _output(self, value: ir.Value) -> str:
        if not value.is_graph_output():
            value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
            self.graph.outputs.append(value)
        return str(value.name)
