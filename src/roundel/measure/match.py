"""Which tensor of the float graph is which tensor of the quantized one.

Both graphs come without Q/DQ nodes. Partners are found by position (graph inputs and outputs), by name (with
the suffixes that quantizers add taken off), and, where a tool has renamed a tensor, by structure: the same
operator on tensors that are partners already.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from roundel.errors import ModelError
from roundel.model.graph import constant_array, is_constant, iter_values, only_reader, op_key, values_by_name
from roundel.qdq import attach
from roundel.qdq.names import bare_name
from roundel.targets.operators import FUSING_CONSUMERS as ACTIVATIONS


@dataclass(frozen=True, slots=True, eq=False)
class Matches:
    """Partners, by the names of the quantized graph.

    Attributes:
        tensors: name in the quantized graph -> value of the float graph.
        nodes: name in the quantized graph -> node of the float graph.
        unmatched: computed float tensors of the quantized graph without a partner.
    """

    tensors: Mapping[str, ir.Value]
    nodes: Mapping[str, ir.Node]
    unmatched: tuple[str, ...]


def match(reference: ir.Model, stripped: ir.Model) -> Matches:
    """Find partners for the tensors and nodes of the quantized model.

    Args:
        reference: the float model.
        stripped: the quantized model without its Q/DQ pairs.

    Raises:
        ModelError: the models do not have the same inputs or outputs.
    """
    work = _Matcher(reference.graph, stripped.graph)
    work.ends()
    work.names()
    work.absorbed_activations()
    work.structure()
    left = [str(v.name) for v in _computed(stripped.graph) if v.name not in work.partners]
    return Matches(work.partners, work.node_pairs(), tuple(left))


class _Matcher:
    def __init__(self, reference: ir.Graph, quantized: ir.Graph) -> None:
        self.reference, self.quantized = reference, quantized
        self.partners: dict[str, ir.Value] = {}
        self._taken: set[ir.Value] = set()

    def ends(self) -> None:
        """Graph inputs and outputs, by name where the names agree, else by position."""
        sides = (
            ("inputs", self.reference.inputs, self.quantized.inputs),
            ("outputs", self.reference.outputs, self.quantized.outputs),
        )
        for what, ours, theirs in sides:
            if len(ours) != len(theirs):
                raise ModelError(
                    f"The two models do not have the same {what}.",
                    observed=f"float: {_listed(ours)}; quantized: {_listed(theirs)}",
                    expected="a quantized model that was made from this float model",
                )
            by_name = {bare_name(str(v.name)): v for v in ours}
            for position, value in enumerate(theirs):
                self._pair(by_name.get(bare_name(str(value.name)), ours[position]), value)

    def names(self) -> None:
        """Tensors of the same name."""
        ours = {bare_name(str(v.name)): v for v in _computed(self.reference)}
        for value in _computed(self.quantized):
            partner = ours.get(bare_name(str(value.name)))
            if partner is not None:
                self._pair(partner, value)

    def absorbed_activations(self) -> None:
        """Where a quantizer has taken a Relu's or a Clip's place, its tensor is the activation's output."""
        for value in _computed(self.quantized):
            self._absorb(value)

    def structure(self) -> None:
        """Renamed tensors: the same operator reads partners of the same tensors."""
        for node in self.quantized:
            if all(str(out.name) in self.partners or not is_real(out) for out in node.outputs):
                continue
            twins = sorted(self._twins(node), key=lambda twin: twin.name != node.name)
            if twins:
                for ours, theirs in zip(twins[0].outputs, node.outputs, strict=False):
                    self._pair(ours, theirs)
                    self._absorb(theirs)

    def node_pairs(self) -> dict[str, ir.Node]:
        """Nodes that make partners with the same operator."""
        pairs = {}
        for node in self.quantized:
            for out in node.outputs:
                ours = self.partners.get(str(out.name))
                maker = None if ours is None else ours.producer()
                if maker is not None and op_key(maker) in ACTIVATIONS and op_key(maker) != op_key(node):
                    source = maker.inputs[0]
                    maker = None if source is None else source.producer()
                if maker is not None and op_key(maker) == op_key(node):
                    pairs[str(node.name)] = maker
                    break
        return pairs

    def _absorb(self, value: ir.Value) -> None:
        ours = self.partners.get(str(value.name))
        node = None if ours is None else only_reader(ours)
        if ours is None or node is None or op_key(node) not in ACTIVATIONS or node.inputs[0] is not ours:
            return
        kept = any(op_key(use.node) in ACTIVATIONS for use in value.uses())
        if not kept and node.outputs[0] not in self._taken:
            self._taken.remove(ours)
            self._taken.add(node.outputs[0])
            self.partners[str(value.name)] = node.outputs[0]

    def _twins(self, node: ir.Node) -> Iterator[ir.Node]:
        """Nodes of the float graph that could be this one."""
        data = [(i, v) for i, v in enumerate(node.inputs) if v is not None and not is_constant(v)]
        if not data or any(str(value.name) not in self.partners for _, value in data):
            return
        wanted = [(index, self.partners[str(value.name)]) for index, value in data]
        first_index, first = wanted[0]
        for use in first.uses():
            twin = use.node
            if use.idx != first_index or op_key(twin) != op_key(node) or twin.graph is not self.reference:
                continue
            same = all(index < len(twin.inputs) and twin.inputs[index] is value for index, value in wanted)
            if same and _weights(twin) == _weights(node) and self._taken.isdisjoint(twin.outputs):
                yield twin

    def _pair(self, ours: ir.Value, theirs: ir.Value) -> None:
        name = str(theirs.name)
        if name in self.partners or ours in self._taken or not (is_real(ours) and is_real(theirs)):
            return
        self.partners[name] = ours
        self._taken.add(ours)


def is_real(value: ir.Value) -> bool:
    """Whether the value may be a 32-bit float tensor: known to be one, or of unknown type."""
    return value.dtype in (None, ir.DataType.FLOAT)


def _weights(node: ir.Node) -> list[tuple[int, ...]]:
    """Shapes of the constants that the node reads."""
    arrays = (constant_array(value) for value in node.inputs)
    return [array.shape for array in arrays if array is not None]


def _computed(graph: ir.Graph) -> Iterator[ir.Value]:
    return (v for v in iter_values(graph) if not is_constant(v) and v.name and is_real(v))


def _listed(values: Sequence[ir.Value]) -> str:
    return ", ".join(str(value.name) for value in values)


def cut_to(model: ir.Model, outputs: Sequence[str], *, drop_inputs: Collection[str] = ()) -> ir.Model:
    """A copy with these outputs and nothing that they do not need; AMD's operators have their bodies.

    Args:
        model: it is not changed.
        outputs: tensors of the main graph.
        drop_inputs: graph inputs to leave out; none of the outputs may depend on them.
    """
    copy = model.clone()
    graph, values = copy.graph, values_by_name(copy.graph)
    graph.outputs.clear()
    for name in outputs:
        value = values[name]
        value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
        graph.outputs.append(value)
    read: set[ir.Value] = set(graph.outputs)
    needed: set[ir.Node] = set()
    pending = list(graph.outputs)
    while pending:
        node = pending.pop().producer()
        if node is None or node in needed:
            continue
        needed.add(node)
        inputs = [value for value in (*node.inputs, *_captured(node)) if value is not None]
        read.update(inputs)
        pending += inputs
    graph.remove([node for node in graph if node not in needed])
    for value in [v for v in graph.inputs if v.name in drop_inputs]:
        graph.inputs.remove(value)
    # ONNX Runtime refuses to be lent a weight that nothing reads.
    for name in [name for name, value in graph.initializers.items() if value not in read]:
        del graph.initializers[name]
    return attach(copy)


def _captured(node: ir.Node) -> Iterator[ir.Value]:
    """Values that the bodies of a node read."""
    for attribute in node.attributes.values():
        if attribute.type is ir.AttributeType.GRAPH:
            for inner in attribute.as_graph().all_nodes():
                yield from (value for value in inner.inputs if value is not None)
