"""The quantized model with a shadow: every layer a second time, on the float model's tensors.

One run then gives, for each point, what the quantized model computes (`shown`), what the layer alone makes of
float inputs (`shadow`), and the float tensor stored as the quantized model stores it (`stored`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from roundel.measure.points import Point, unusual
from roundel.model.graph import is_constant, values_by_name
from roundel.qdq.read import source_of, stores

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


@dataclass(frozen=True, slots=True, eq=False)
class Extended:
    """The model, and where to find each point's tensors, by the point's name."""

    model: ir.Model
    fetches: Mapping[str, Fetch]


def extend(quantized: ir.Model, points: Sequence[Point]) -> Extended:
    """Add the shadow. The model passed in is not changed."""
    model = quantized.clone()
    return _Builder(model, points).build()


class _Builder:
    def __init__(self, model: ir.Model, points: Sequence[Point]) -> None:
        self.model, self.graph = model, model.graph
        values = values_by_name(model.graph)
        self.points = {values[str(p.raw.name)]: p for p in points}
        self.shown = {p.name: values[str(p.shown.name)] for p in points}
        self.feeds: dict[ir.Value, ir.Value] = {}
        self.shadows: dict[ir.Value, ir.Value] = {}
        self.fixed: set[ir.Value] = set()  # computed from constants alone: shared, not doubled
        self.lost: set[ir.Value] = set()  # cannot be doubled

    def build(self) -> Extended:
        for raw, point in self.points.items():
            self.feeds[raw] = self._input(_FEED + point.name)
            if raw.is_graph_input():
                self.shadows[raw] = self.feeds[raw]
        originals = list(self.graph)
        for node in originals:
            self._double(node)
        fetches = {}
        for raw, point in self.points.items():
            shown = self.shown[point.name]
            stored = self._stored(raw, shown)
            shadow = stored if raw.is_graph_input() else self._shadow(shown)
            fetches[point.name] = Fetch(
                feed=str(self.feeds[raw].name),
                shown=self._output(shown),
                shadow=None if shadow is None else self._output(shadow),
                stored=None if stored is None else self._output(stored),
            )
        return Extended(self.model, fetches)

    def _double(self, node: ir.Node) -> None:
        """Compute the node again from the float tensors, unless it has nothing to do with them."""
        inputs = [value for value in node.inputs if value is not None]
        if all(is_constant(value) or value in self.fixed for value in inputs) and not unusual(node):
            self.fixed.update(node.outputs)
            return
        mapped = [None if value is None else self._seen_by(node, value) for value in node.inputs]
        if unusual(node) or any(value in self.lost for value in mapped if value is not None):
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

    def _shadow(self, shown: ir.Value) -> ir.Value | None:
        """The double of a tensor; the tensor itself where nothing before it has a partner."""
        return None if shown in self.lost else self.shadows.get(shown, shown)

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

    def _input(self, name: str) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT))
        self.graph.inputs.append(value)
        return value

    def _output(self, value: ir.Value) -> str:
        if not value.is_graph_output():
            if value.type is None:
                value.type = ir.TensorType(ir.DataType.FLOAT)
            self.graph.outputs.append(value)
        return str(value.name)
