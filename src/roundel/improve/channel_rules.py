"""How each operator carries channels and their bounds from its inputs to its output.

A rule returns what it knows of the output, or None where the operator does not carry a rescaled channel:
its inputs then keep the factor 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product

import numpy as np
import onnx_ir as ir

from roundel.improve.channels import UNKNOWN, Bounds, Channels, Flow, Ids, Rescaled, bounded, rescalable
from roundel.model.graph import (
    FLOAT_TYPES,
    any_reduced_axes,
    attribute_float,
    attribute_int,
    attribute_ints,
    attribute_string,
    clip_bounds,
    constant_array,
    constant_scalar,
    dims,
    input_at,
    integers,
    only_reader,
    op_key,
    same_rank,
)
from roundel.targets.operators import OPERATORS, Trait, ops_with
from roundel.types import Doubles

Rule = Callable[["Trace", ir.Node], Flow | None]


def _single(trace: Trace, node: ir.Node) -> Flow | None:
    """The flow of the first input, where every other input is a constant."""
    others = [value for value in node.inputs[1:] if value is not None]
    if any(constant_array(value) is None for value in others):
        return None
    return trace.flow(input_at(node, 0))


def _pooled(trace: Trace, node: ir.Node) -> Flow | None:
    flow = _single(trace, node)
    if flow is None or (flow.ids is not None and flow.axis != 1):
        return None
    automatic = attribute_string(node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID")
    rims = automatic or any(attribute_ints(node, "pads") or ()) or attribute_int(node, "ceil_mode", 0)
    if node.op_type == "AveragePool" and rims:
        return flow.or_zero()
    return flow


def _relu(trace: Trace, node: ir.Node) -> Flow | None:
    flow = _single(trace, node)
    if flow is None:
        return None
    if flow.ids is not None:
        flow = trace.simplified(node, flow, np.inf)
    return flow.within(np.maximum(flow.low, 0), np.maximum(flow.high, 0))


def _leaky(trace: Trace, node: ir.Node) -> Flow | None:
    flow = _single(trace, node)
    if flow is None:
        return None
    slope: Doubles | None = np.array(attribute_float(node, "alpha", 0.01))
    if node.op_type == "PRelu":
        slope = constant_array(input_at(node, 1))
        source = input_at(node, 0)
        if slope is None or source is None or source.shape is None or slope.ndim > len(source.shape):
            return None
    if slope is None or not slope.size or slope.min() < 0 or slope.max() > 1:
        return flow.within(-np.inf, np.inf)
    return flow.or_zero()


def _clip(trace: Trace, node: ir.Node) -> Flow | None:
    flow, limits = _single(trace, node), clip_bounds(node)
    if flow is None or limits is None:
        return None
    bottom, top = (np.inf * sign if x is None else x for x, sign in zip(limits, (-1, 1), strict=True))
    if flow.ids is None:
        return flow.within(np.clip(flow.low, bottom, top), np.clip(flow.high, bottom, top))
    if bottom > 0 or top <= 0:
        return None
    if bottom == 0:
        flow = trace.simplified(node, flow, top)
    assert flow.ids is not None
    most = np.full(flow.high.shape, np.inf)
    with np.errstate(divide="ignore"):
        if np.isfinite(top):
            most = np.where(flow.high > 0, top / flow.high, most)
        if bottom < 0 and np.isfinite(bottom):
            most = np.minimum(most, np.where(flow.low < 0, bottom / flow.low, np.inf))
    trace.channels.cap(flow.ids, most)
    return flow.within(np.clip(flow.low, bottom, top), np.clip(flow.high, bottom, top))


def _pad(trace: Trace, node: ir.Node) -> Flow | None:
    flow = _single(trace, node)
    pads = attribute_ints(node, "pads") or integers(input_at(node, 1))
    if flow is None or pads is None or input_at(node, 3) is not None:
        return None
    if flow.ids is not None and (pads[flow.axis] or pads[flow.axis + len(pads) // 2]):
        return None
    if attribute_string(node, "mode", "constant") != "constant":
        return flow
    filler = input_at(node, 2)
    value = attribute_float(node, "value", 0.0) if filler is None else constant_scalar(filler)
    if value != 0:
        return None
    return flow.or_zero()


def _resized(trace: Trace, node: ir.Node) -> Flow | None:
    flow = _single(trace, node)
    before, after = dims(input_at(node, 0)), dims(node.outputs[0])
    if flow is None or attribute_string(node, "coordinate_transformation_mode", "") == "tf_crop_and_resize":
        return None
    if flow.ids is not None and (before is None or after is None or len(before) != len(after)):
        return None
    if (
        flow.ids is not None
        and before
        and after
        and not before[flow.axis] == after[flow.axis] == flow.low.size
    ):
        return None
    return flow if attribute_string(node, "mode", "nearest") != "cubic" else flow.within(-np.inf, np.inf)


def _transposed(trace: Trace, node: ir.Node) -> Flow | None:
    flow, order = trace.flow(input_at(node, 0)), attribute_ints(node, "perm")
    if flow.ids is None:
        return flow
    return None if order is None else replace(flow, axis=order.index(flow.axis))


def _flattened(trace: Trace, node: ir.Node) -> Flow | None:
    """[N, C, ...] to [N, C * ...]: each channel becomes a run of neighbours."""
    flow = trace.flow(input_at(node, 0))
    before, after = dims(input_at(node, 0)), dims(node.outputs[0])
    if flow.ids is None:
        return flow
    if before is None or after is None or len(after) != 2 or flow.axis != 1 or len(before) < 2:
        return None
    sizes = [dim for dim in before[1:] if dim is not None]
    size = math.prod(sizes)
    if len(sizes) + 1 != len(before) or after[1] != size or before[1] != flow.low.size:
        return None
    run = size // max(flow.low.size, 1)
    return Flow(1, np.repeat(flow.ids, run), np.repeat(flow.low, run), np.repeat(flow.high, run))


def _reduced(trace: Trace, node: ir.Node) -> Flow | None:
    flow, source = _single(trace, node), input_at(node, 0)
    if flow is None or flow.ids is None or source is None or source.shape is None:
        return flow
    rank = len(source.shape)
    if node.op_type == "Squeeze":
        axes, keep = attribute_ints(node, "axes") or integers(input_at(node, 1)), 0
        axes = None if axes is None else tuple(axis % rank for axis in axes)
    else:
        axes, keep = any_reduced_axes(node, rank), attribute_int(node, "keepdims", 1)
    if not axes or flow.axis in axes:
        return None
    return flow if keep else replace(flow, axis=flow.axis - sum(axis < flow.axis for axis in axes))


def _add(trace: Trace, node: ir.Node) -> Flow | None:
    left, right = (trace.flow(value) for value in node.inputs)
    low, high = _total(left, right)
    a, b = left.ids, right.ids
    values = [value for value in node.inputs if value is not None]
    if a is None and b is None:
        return Flow(0, None, low, high)
    tied = a is not None and b is not None and left.axis == right.axis and a.size == b.size
    if not tied or a is None or b is None or len(values) != 2 or not same_rank(*values):
        return None
    trace.channels.tie(a, b)
    return Flow(left.axis, a, low, high)


def _total(left: Flow, right: Flow) -> Bounds:
    if left.low.size != right.low.size and 1 not in (left.low.size, right.low.size):
        left, right = left.hull(), right.hull()
    return left.low + right.low, left.high + right.high


def _mul(trace: Trace, node: ir.Node) -> Flow | None:
    """A tensor times one that is not rescaled, as a gate: the product scales along."""
    flows = [trace.flow(value) for value in node.inputs]
    scaled = [i for i, flow in enumerate(flows) if flow.ids is not None]
    values = [value for value in node.inputs if value is not None]
    if len(scaled) > 1 or len(values) != 2:
        return None
    if scaled and not _spans(values[scaled[0]], flows[scaled[0]], node.outputs[0]):
        return None
    left, right = (flows[0], flows[1]) if not scaled or scaled[0] == 0 else (flows[1], flows[0])
    corners = product((left.low, left.high), (right.low, right.high))
    with np.errstate(invalid="ignore"):
        ends = [np.nan_to_num(a * b, nan=0.0, posinf=np.inf, neginf=-np.inf) for a, b in corners]
    return left.within(np.minimum.reduce(ends), np.maximum.reduce(ends))


def _spans(value: ir.Value, flow: Flow, result: ir.Value) -> bool:
    """Whether the channels of the product are those of the value: no broadcasting moved or widened them."""
    before, after = dims(value), dims(result)
    if before is None or after is None or len(before) != len(after):
        return False
    return after[flow.axis] == flow.low.size


def _concat(trace: Trace, node: ir.Node) -> Flow | None:
    flows = [trace.flow(value) for value in node.inputs]
    known = [flow for flow in flows if flow.ids is not None]
    rank = None if node.outputs[0].shape is None else len(node.outputs[0].shape)
    if not known or rank is None:
        return None
    axis = attribute_int(node, "axis", 0) % rank
    if any(flow.axis != axis for flow in known):
        return None
    parts = []
    for value, flow in zip(node.inputs, flows, strict=True):
        if flow.ids is None:
            sizes = dims(value)
            size = None if sizes is None else sizes[axis]
            if size is None:
                return None
            ids = trace.channels.fresh(size)
            trace.channels.fix(ids)
            flow = Flow(axis, ids, np.repeat(flow.low, size), np.repeat(flow.high, size))
        parts.append(flow)
    ids = np.concatenate([flow.ids for flow in parts if flow.ids is not None])
    low, high = (np.concatenate(side) for side in zip(*((f.low, f.high) for f in parts), strict=True))
    return Flow(axis, ids, low, high)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("Identity", "Dropout"), _single),
    **dict.fromkeys(ops_with(Trait.POOL), _pooled),
    **dict.fromkeys(("LeakyRelu", "PRelu"), _leaky),
    **dict.fromkeys(("Flatten", "Reshape"), _flattened),
    **dict.fromkeys(("ReduceMean", "Squeeze"), _reduced),
    "Relu": _relu,
    "Clip": _clip,
    "Pad": _pad,
    "Resize": _resized,
    "Transpose": _transposed,
    "Add": _add,
    "Mul": _mul,
    "Concat": _concat,
}


_RANGES = {op: row.bounds for op, row in OPERATORS.items() if row.bounds is not None}


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

    def __init__(self, graph: ir.Graph, *, absorb: bool, rules: Mapping[str, Rule] = RULES) -> None:
        self.graph, self.absorb, self._rules = graph, absorb, rules
        self.channels = Channels()
        self.layers: list[Rescaled] = []
        self.sides: list[tuple[Ids | None, Ids]] = []
        self.silenced = 0
        self.absorbed = 0
        self._flows: dict[ir.Value, Flow] = {}
        self._flows.update((v, _FLOAT_INPUT) for v in graph.inputs if v.dtype in FLOAT_TYPES)
        # Read ahead: what a layer absorbs is added before the trace gets to it.
        self._by_node = {node: layer for node in graph if (layer := rescalable(node)) is not None}
        for node in graph:
            self._visit(node)

    def flow(self, value: ir.Value | None) -> Flow:
        """What is known of a value."""
        if value is None:
            return UNKNOWN
        known = self._flows.get(value)
        if known is not None:
            return known
        array = constant_array(value)
        if array is None or array.dtype.kind != "f" or not array.size:
            return UNKNOWN
        return bounded(float(array.min()), float(array.max()))

    def _visit(self, node: ir.Node) -> None:
        layer = self._by_node.get(node)
        if layer is not None:
            self._record(node.outputs[0], self._through(layer))
            return
        handler = self._rules.get(op_key(node))
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

    def _through(self, rescaled: Rescaled) -> Flow:
        given = self.flow(rescaled.layer.node.inputs[0])
        matches = given.axis == rescaled.data_axis and given.low.size == len(rescaled.columns)
        if given.ids is not None and not matches:
            self.channels.fix(given.ids)
            given = given.hull()
        if given.ids is not None:
            # A channel that is always zero needs no weights.
            rescaled.columns[(given.low == 0) & (given.high == 0)] = 0.0
        ids = self.channels.fresh(len(rescaled.rows))
        self.layers.append(rescaled)
        self.sides.append((given.ids, ids))
        low, high = rescaled.bounds(given.low, given.high)
        return Flow(rescaled.output_axis, ids, low, high)

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

    def _unpadded_readers(self, value: ir.Value, flow: Flow) -> list[Rescaled]:
        """Every reader, where all are layers that can take a constant; otherwise none."""
        found = []
        for use in value.uses():
            layer = self._by_node.get(use.node) if use.idx == 0 else None
            if layer is None or not layer.takes_constants or use.node.graph is not self.graph:
                return []
            if layer.data_axis != flow.axis or len(layer.columns) != flow.low.size:
                return []
            found.append(layer)
        return [] if value.is_graph_output() else found
