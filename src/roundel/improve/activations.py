"""SiLU and gates where the NPU has a straight sigmoid: their slopes fold into the layers around them.

XINT8 has HardSigmoid (slope 1/6) for Sigmoid. x * HardSigmoid(k * x) has a slope that is free: the layer
before is multiplied by k, and all layers behind are divided by it, which is exact wherever only operators
that scale along lie between. A gate alone, whose input is nobody else's, may be shifted, too.

Two models come out: one that computes as the NPU does, whose outputs have moved a little, and a reference in
the same units that still computes what the model as given does. Steps that ask what is wanted run the latter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from roundel.improve.channel_rules import RULES, Trace
from roundel.improve.channels import Flow, Ids, Rescaled
from roundel.improve.targets import float_targets
from roundel.model.edit import Editor
from roundel.model.graph import input_at, integers, is_op, only_reader, rank
from roundel.model.layers import Layer
from roundel.numerics.gates import SLOPES, fit_gate, swish_errors
from roundel.plan import QuantPlan
from roundel.plan.adjust import becomes_hard_sigmoid
from roundel.recipe.settings import Npu
from roundel.types import Doubles, Sample

_POINTS = 64  # of each channel's distribution


@dataclass(frozen=True, slots=True, eq=False)
class Gate:
    """A Sigmoid that the NPU computes as HardSigmoid, behind a layer.

    Attributes:
        node: the Sigmoid.
        source: what it reads: the layer's output.
        product: of a SiLU, what multiplies the two; None where nobody else reads the source.
    """

    node: ir.Node
    source: ir.Value
    product: ir.Node | None


@dataclass(frozen=True, slots=True, eq=False)
class Bend:
    """What one gate's source is multiplied by and what is added to it, one number or one for each channel."""

    slope: Doubles
    shift: Doubles


def find_gates(graph: ir.Graph, plan: QuantPlan, npu: Npu) -> tuple[Gate, ...]:
    """The Sigmoids that are written as HardSigmoid and whose input can be rescaled."""
    found = []
    for node in graph:
        source = input_at(node, 0)
        known = plan.nodes.get(str(node.name))
        if source is None or source.is_graph_output() or not becomes_hard_sigmoid(node, plan, npu):
            continue
        if known is None or not known.quantized:
            continue
        behind, readers = only_reader(node.outputs[0]), {use.node for use in source.uses()}
        if behind is not None and is_op(behind, "Mul") and readers == {node, behind}:
            found.append(Gate(node, source, behind))
        elif readers == {node}:
            found.append(Gate(node, source, None))
    return tuple(found)


class Surroundings:
    """The layers around a graph's gates, and which channels must be scaled alike.

    Attributes:
        layers: for each gate whose source can be rescaled, the layer that makes it.
        ids: for each SiLU among them, the channels of its product.
    """

    def __init__(self, graph: ir.Graph, gates: Sequence[Gate]) -> None:
        self._products = {gate.product: gate for gate in gates if gate.product is not None}
        self._ids: dict[Gate, Ids] = {}
        rules = {**RULES, "Mul": self._multiplied, "Slice": _sliced}
        self.trace = Trace(graph, absorb=False, rules=rules)
        makers = {layer.layer.node.outputs[0]: layer for layer in self.trace.layers if layer.takes_bias}
        self.layers: dict[Gate, Rescaled] = {
            gate: makers[gate.source]
            for gate in gates
            if gate.source in makers and (gate.product is None or gate in self._ids)
        }
        self.ids = {gate: ids for gate, ids in self._ids.items() if gate in self.layers}
        self._settled = self.trace.channels.settle()

    def _multiplied(self, trace: Trace, node: ir.Node) -> Flow | None:
        """A SiLU's product has channels of its own: its slope decides how they are scaled."""
        gate = self._products.get(node)
        if gate is None:
            return RULES["Mul"](trace, node)
        flow = trace.flow(gate.source)
        if flow.ids is None:
            return None
        trace.channels.fix(flow.ids)
        self._ids[gate] = trace.channels.fresh(flow.ids.size)
        free = np.full(flow.ids.size, np.inf)
        return Flow(flow.axis, self._ids[gate], -free, free)

    def groups(self) -> list[list[Gate]]:
        """SiLUs whose products meet in a sum, and so need one slope; none that cannot have any but 1."""
        found: list[tuple[set[int], list[Gate]]] = []
        for gate, ids in self.ids.items():
            roots, together = set(self._settled.roots[ids].tolist()), [gate]
            apart = []
            for others, gates in found:
                if roots.isdisjoint(others):
                    apart.append((others, gates))
                else:
                    roots, together = roots | others, gates + together
            found = [*apart, (roots, together)]
        fixed = self._settled.fixed
        return [gates for _, gates in found if not any(fixed[self.ids[gate]].any() for gate in gates)]

    def fold(self, editor: Editor, bends: Mapping[Gate, Bend]) -> None:
        """Put slopes and shifts into the layers."""
        factors = np.ones(len(self._settled.roots))
        for gate, ids in self.ids.items():
            if gate in bends:
                factors[self._settled.roots[ids]] = bends[gate].slope
        factors = factors[self._settled.roots]
        for layer, (given, made) in zip(self.trace.layers, self.trace.sides, strict=True):
            layer.rows[...] *= factors[made]
            layer.bias[...] *= factors[made]
            if given is not None:
                layer.columns[...] /= factors[given]
        for gate, bend in bends.items():
            layer = self.layers[gate]
            layer.rows[...] *= bend.slope
            layer.bias[...] = layer.bias * bend.slope + bend.shift
        for layer in self.trace.layers:
            layer.store(editor)


def _sliced(trace: Trace, node: ir.Node) -> Flow | None:
    """Some of the channels, or all of them where another axis is cut."""
    flow, dims = trace.flow(input_at(node, 0)), rank(input_at(node, 0))
    given = [input_at(node, index) for index in (1, 2, 3, 4)]
    starts, ends, axes, steps = (integers(value) for value in given)
    if flow.ids is None:
        return flow
    if starts is None or ends is None or axes is None or dims is None:
        return None
    if steps is None and given[3] is not None:
        return None
    cuts = zip((axis % dims for axis in axes), starts, ends, steps or (1,) * len(axes), strict=True)
    for axis, start, end, step in cuts:
        if axis == flow.axis:
            if step < 1:
                return None
            part = slice(start, end, step)
            flow = Flow(axis, flow.ids[part], flow.low[part], flow.high[part])
            assert flow.ids is not None
    return flow if flow.ids is not None and flow.ids.size else None


# What to choose.


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """Ways to bend the gates of a model.

    Attributes:
        gates: all that may be bent.
        ways: for each way, by the gates' nodes.
    """

    gates: tuple[Gate, ...]
    ways: tuple[Mapping[str, Bend], ...]


def find_choices(model: ir.Model, gates: tuple[Gate, ...], samples: Sequence[Sample]) -> Choices:
    """One slope for all SiLUs, and one for each that is free; gates alone are fitted channel by channel.

    Which is better shows at the outputs only: the slope with the least error of its own is not the best
    for the network.

    Args:
        model: the prepared float model.
        gates: found in it.
        samples: what their inputs are like.
    """
    around = Surroundings(model.graph, gates)
    alone = [gate for gate in around.layers if gate.product is None]
    groups = around.groups()
    bent = [*alone, *(gate for group in groups for gate in group)]
    if not bent:
        return Choices(gates, ())
    seen = _distributions(model, [around.layers[gate].layer for gate in bent], samples)
    points = dict(zip(bent, seen, strict=True))
    fixed = {str(gate.node.name): Bend(*fit_gate(points[gate])) for gate in alone}
    errors = [np.sum([swish_errors(points[gate]) for gate in group], axis=0) for group in groups]
    each = {**fixed, **_slopes(groups, errors)}
    if len(groups) < 2:
        return Choices(gates, (each,))
    return Choices(gates, ({**fixed, **_slopes(groups, [np.sum(errors, axis=0)] * len(groups))}, each))


def _slopes(groups: Sequence[Sequence[Gate]], errors: Sequence[Doubles]) -> dict[str, Bend]:
    """The slope of the least error for each group."""
    found = {}
    for group, error in zip(groups, errors, strict=True):
        slope = np.asarray(SLOPES[int(np.argmin(error))])
        found.update({str(gate.node.name): Bend(slope, np.zeros(())) for gate in group})
    return found


def _distributions(model: ir.Model, layers: Sequence[Layer], samples: Sequence[Sample]) -> list[Doubles]:
    """For each layer (channels, points): what its outputs are, evenly spaced by rank."""
    found = []
    for targets in float_targets(model, layers, samples):
        values = np.concatenate([target.values for target in targets])
        ordered = np.sort(values.reshape(len(values), -1), axis=0)
        ranks = (np.arange(_POINTS) + 0.5) / _POINTS * len(ordered)
        found.append(np.ascontiguousarray(ordered[ranks.astype(int)].T, np.float64))
    return found


# What to do.


def bend(model: ir.Model, gates: Sequence[Gate], way: Mapping[str, Bend]) -> tuple[ir.Model, ir.Model]:
    """The model with HardSigmoid for these gates, and the reference: as given, in the same units.

    Args:
        model: the prepared float model.
        gates: found in it.
        way: slopes and shifts by the Sigmoid's name; other gates stay as they are.
    """
    work = model.clone()
    nodes = {str(node.name): node for node in work.graph}
    copies = [_copied(gate, nodes) for gate in gates]
    around = Surroundings(work.graph, copies)
    bends = {gate: way[str(gate.node.name)] for gate in copies if str(gate.node.name) in way}
    around.fold(Editor(work), bends)
    reference = _reference(work, bends)
    for gate in bends:
        _straighten(gate.node)
    return work, reference


def as_computed(model: ir.Model, plan: QuantPlan, npu: Npu) -> ir.Model:
    """A copy in which every Sigmoid that is written as HardSigmoid is one."""
    work = model.clone()
    for node in work.graph:
        known = plan.nodes.get(str(node.name))
        if known is not None and known.quantized and becomes_hard_sigmoid(node, plan, npu):
            _straighten(node)
    return work


def _straighten(node: ir.Node) -> None:
    node.op_type = "HardSigmoid"
    node.attributes["alpha"] = ir.AttrFloat32("alpha", 1 / 6)
    node.attributes["beta"] = ir.AttrFloat32("beta", 0.5)


def _copied(gate: Gate, nodes: Mapping[str, ir.Node]) -> Gate:
    node = nodes[str(gate.node.name)]
    source = node.inputs[0]
    assert source is not None
    return Gate(node, source, None if gate.product is None else nodes[str(gate.product.name)])


def _reference(folded: ir.Model, bends: Mapping[Gate, Bend]) -> ir.Model:
    """Each gate reads what it did before the slope, and a SiLU's product gets it behind."""
    model = folded.clone()
    editor, nodes = Editor(model), {str(node.name): node for node in model.graph}
    for gate, bent in bends.items():
        own = _copied(gate, nodes)
        width = (-1, *[1] * ((rank(own.source) or 2) - 2))
        slope, shift = (np.asarray(array, np.float32) for array in (bent.slope, bent.shift))
        uses = [(use.node, use.idx) for use in own.source.uses()]
        plain = own.source
        if shift.any():
            plain = editor.insert_after(plain, "Sub", shift.reshape(width), readers=uses)
        editor.insert_after(plain, "Div", slope.reshape(width) if slope.ndim else slope, readers=uses)
        if own.product is not None:
            old = own.product.outputs[0]
            scaled = editor.insert_after(old, "Mul", slope)
            name = str(old.name)
            old.name, scaled.name = editor.fresh(f"{name}_plain"), name
    return model
