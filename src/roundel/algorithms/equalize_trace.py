"""One walk over the graph: which channels scale together, and which values they can have."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from roundel.algorithms.equalize_channels import Channels, Ids
from roundel.algorithms.equalize_flow import UNKNOWN, Flow, bounded
from roundel.algorithms.equalize_layers import Layer, read_layer
from roundel.algorithms.equalize_rules import RULES
from roundel.model.graph import FLOAT_TYPES, op_key
from roundel.passes.rewriting import constant, only_reader

_RANGES = {
    "Sigmoid": (0.0, 1.0),
    "HardSigmoid": (0.0, 1.0),
    "Softmax": (0.0, 1.0),
    "Tanh": (-1.0, 1.0),
    "Erf": (-1.0, 1.0),
}


# No model is fed more than this. Without a limit, the weights of 1e-20 that a folded batch norm leaves in
# a dead channel would count as reaching anything.
_FLOAT_INPUT = bounded(-(2.0**30), 2.0**30)


class Trace:
    """The layers of a graph with the channels between them.

    Attributes:
        layers: every layer, in graph order.
        channels: what ties, fixes and limits them.
        sides: for each layer the channels of its input (None where they cannot be rescaled) and output.
        silenced: channels that were found to be constant and were taken out.
        absorbed: channels of which a constant part moved into the layers behind.
    """

    def __init__(self, graph: ir.Graph, *, absorb: bool) -> None:
        self.graph, self.absorb = graph, absorb
        self.channels = Channels()
        self.layers: list[Layer] = []
        self.sides: list[tuple[Ids | None, Ids]] = []
        self.silenced = 0
        self.absorbed = 0
        self._flows: dict[ir.Value, Flow] = {}
        self._flows.update((v, _FLOAT_INPUT) for v in graph.inputs if v.dtype in FLOAT_TYPES)
        # Read ahead: what a layer absorbs is added before the walk gets to it.
        self._by_node = {node: layer for node in graph if (layer := read_layer(node)) is not None}
        for node in graph:
            self._visit(node)

    def flow(self, value: ir.Value | None) -> Flow:
        """What is known of a value."""
        if value is None:
            return UNKNOWN
        known = self._flows.get(value)
        if known is not None:
            return known
        array = constant(value)
        if array is None or array.dtype.kind != "f" or not array.size:
            return UNKNOWN
        return bounded(float(array.min()), float(array.max()))

    def _visit(self, node: ir.Node) -> None:
        layer = self._by_node.get(node)
        if layer is not None:
            self._record(node.outputs[0], self._through(layer))
            return
        handler = RULES.get(op_key(node))
        result = handler(self, node) if handler is not None else None
        if result is None:
            self._break(node)
            limits = _RANGES.get(op_key(node))
            result = UNKNOWN if limits is None else bounded(*limits)
        if node.outputs:
            self._record(node.outputs[0], result)

    def _break(self, node: ir.Node) -> None:
        for value in node.inputs:
            ids = self.flow(value).ids
            if ids is not None:
                self.channels.fix(ids)

    def _record(self, value: ir.Value, flow: Flow) -> None:
        if flow is UNKNOWN:
            return
        self._flows[value] = flow.sane()
        outside = value.is_graph_output() or any(use.node.graph is not self.graph for use in value.uses())
        if outside and flow.ids is not None:
            self.channels.fix(flow.ids)

    def _through(self, layer: Layer) -> Flow:
        given = self.flow(layer.node.inputs[0])
        matches = given.axis == layer.data_axis and given.low.size == len(layer.columns)
        if given.ids is not None and not matches:
            self.channels.fix(given.ids)
            given = given.hull()
        if given.ids is not None:
            # A channel that is always zero needs no weights.
            layer.columns[(given.low == 0) & (given.high == 0)] = 0.0
        ids = self.channels.fresh(len(layer.rows))
        self.layers.append(layer)
        self.sides.append((given.ids, ids))
        low, high = layer.bounds(given.low, given.high)
        return Flow(layer.output_axis, ids, low, high)

    def simplified(self, node: ir.Node, flow: Flow, top: float) -> Flow:
        """Behind a Relu or a Clip to [0, top]: take constants out of the layer before it.

        A channel that never gets above zero is zero, one that never gets below the top is the top. What
        a channel has at least, if that is more than zero, the layers behind can have in their biases.
        """
        source = node.inputs[0]
        maker = None if source is None else source.producer()
        layer = None if maker is None else self._by_node.get(maker)
        if layer is None or source is None or only_reader(source) is not node or layer.bias.ndim != 1:
            return flow
        low, high = flow.low.copy(), flow.high.copy()
        for gone, value in ((high <= 0, 0.0), (low >= top, top)):
            if gone.any() and (value == 0 or layer.takes_bias):
                self.silenced += int(np.count_nonzero(gone & (layer.rows != 0)))
                layer.rows[gone], layer.bias[gone] = 0.0, value
                low[gone] = high[gone] = value
        movable = (low > 0) & (high <= top)
        wanted = self.absorb and layer.takes_bias
        behind = self._unpadded_readers(node.outputs[0], flow) if wanted else []
        if movable.any() and behind:
            moved = np.where(movable, low, 0.0)
            for reader in behind:
                reader.bias[...] += reader.response(moved)
            layer.bias[...] -= moved
            low, high = low - moved, high - moved
            self.absorbed += int(np.count_nonzero(movable))
        return flow.within(low, high)

    def _unpadded_readers(self, value: ir.Value, flow: Flow) -> list[Layer]:
        """Every reader, where all are layers that can take a constant; otherwise none."""
        found = []
        for use in value.uses():
            layer = self._by_node.get(use.node) if use.idx == 0 else None
            if layer is None or layer.padded or not layer.takes_bias or use.node.graph is not self.graph:
                return []
            if layer.data_axis != flow.axis or len(layer.columns) != flow.low.size:
                return []
            found.append(layer)
        return [] if value.is_graph_output() else found
