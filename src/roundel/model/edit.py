"""Edits of a graph that keep its names unique and its uses consistent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import onnx_ir as ir

from roundel.model.graph import bodies, input_at, is_op, only_reader, opset_version
from roundel.types import Array

Attributes = Mapping[str, int | float | str | Sequence[int]]


class Names:
    """Names that no value and no node of the graphs, or of a body inside them, has yet."""

    def __init__(self, *graphs: ir.Graph) -> None:
        self._taken: set[str | None] = set()
        for each in (inner for graph in graphs for inner in (graph, *graph.subgraphs())):
            self._taken.update(value.name for value in each.inputs)
            self._taken.update(each.initializers)
            for node in each:
                self._taken.update((node.name, *(value.name for value in node.outputs)))

    def __call__(self, wanted: str) -> str:
        """`wanted`, or `wanted_1` and so on when it is taken."""
        name, count = wanted, 0
        while name in self._taken:
            count += 1
            name = f"{wanted}_{count}"
        self._taken.add(name)
        return name


def add_constant(graph: ir.Graph, name: str, array: Array) -> ir.Value:
    """A new initializer."""
    tensor = ir.Tensor(array, name=name)
    type_ = ir.TensorType(tensor.dtype)
    value = ir.Value(name=name, shape=ir.Shape(array.shape), type=type_, const_value=tensor)
    graph.register_initializer(value)
    return value


class Editor:
    """Edits the main graph of one model and keeps names unique over all its graphs."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.graph = model.graph
        self.opset = opset_version(model)
        self._names: Names | None = None

    def fresh(self, base: str) -> str:
        """A name that no value and no node of the model has yet."""
        self._names = self._names or Names(self.graph)
        return self._names(base)

    def initializer(self, base: str, array: Array) -> ir.Value:
        """A new initializer, named after `base`."""
        return add_constant(self.graph, self.fresh(base), array)

    def set_constant(self, node: ir.Node, index: int, array: Array, base: str) -> None:
        """Give a node a constant input of its own.

        The initializer keeps its name where the node is its only reader. One that others read too is
        left as it is, and the node gets a new one.
        """
        value = input_at(node, index)
        if value is not None and value.is_initializer() and only_reader(value) is node:
            value.const_value = ir.Tensor(array, name=value.name)
            value.shape = ir.Shape(array.shape)
            return
        name = base if value is None or not value.name else value.name
        if index >= len(node.inputs):
            node.resize_inputs(index + 1)
        node.replace_input_with(index, self.initializer(name, array))

    def insert(
        self,
        anchor: ir.Node,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Attributes,
        name: str,
    ) -> ir.Value:
        """Put a new one-output node before `anchor` and return its output."""
        node = ir.node(op_type, inputs, attributes, name=self.fresh(name))
        node.outputs[0].name = self.fresh(f"{name}_output")
        anchor.prepend(node)
        return node.outputs[0]

    def insert_after(
        self,
        value: ir.Value,
        op_type: str,
        constant: Array,
        *,
        readers: Iterable[tuple[ir.Node, int]] | None = None,
        outputs: bool = True,
    ) -> ir.Value:
        """Let readers see `op_type(value, constant)` instead of the value; the shape must stay.

        Args:
            value: any tensor of the main graph.
            op_type: Add, Mul or MatMul.
            constant: its second operand.
            readers: (node, input index) pairs; None for all there are.
            outputs: whether a graph output moves, too; its name moves with it.
        """
        chosen = [(use.node, use.idx) for use in value.uses()] if readers is None else list(readers)
        base = f"{value.name}_{op_type}"
        operand = self.initializer(f"{base}_constant", constant)
        node = ir.node(op_type, [value, operand], name=self.fresh(base))
        made, maker = node.outputs[0], value.producer()
        made.shape, made.type = value.shape, value.type
        made.name = self.fresh(f"{base}_output")
        if maker is None:
            self.graph.insert_before(self.graph[0], node)
        else:
            maker.append(node)
        for reader, index in chosen:
            reader.replace_input_with(index, made)
        if outputs and value.is_graph_output():
            self.hand_over(value, made, f"{value.name}_inner")
        return made

    def hand_over(self, old: ir.Value, new: ir.Value, inner: str) -> None:
        """Let `new` be the graph output that `old` was, under its name; `old` goes on inside as `inner`."""
        for index, output in enumerate(self.graph.outputs):
            if output is old:
                self.graph.outputs[index] = new
        name, old.name = old.name, self.fresh(inner)
        new.name = name

    def replace(
        self, old: ir.Node, op_type: str, inputs: Sequence[ir.Value | None], attributes: Attributes
    ) -> ir.Node:
        """Put a new node in the place of a one-output node; it takes over its names."""
        node = ir.node(op_type, inputs, attributes, name=old.name)
        node.metadata_props.update(old.metadata_props)
        old.prepend(node)
        self.take_over(old.outputs[0], node.outputs[0])
        self.drop(old)
        return node

    def take_over(self, old: ir.Value, new: ir.Value) -> None:
        """Let `new` stand wherever `old` stood, graph outputs included, under the name of `old`."""
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        name, old.name = old.name, None
        new.name = name
        if old.shape is not None:
            new.shape = old.shape
        if old.type is not None:
            new.type = old.type
        new.metadata_props.update(old.metadata_props)

    def drop(self, node: ir.Node) -> None:
        """Remove a node whose outputs nobody reads, and its claims on other values."""
        detach(node)
        self.graph.remove(node)

    def replace_all(
        self,
        nodes: Collection[ir.Node],
        last: ir.Node,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Attributes,
    ) -> None:
        """Put one node in the place of several that only read each other, under the last one's names."""
        self.replace(last, op_type, inputs, attributes)
        for node in nodes:
            if node is not last:
                self.drop(node)


def rewrite(model: ir.Model, change: Callable[[Editor, ir.Node], bool], *op_types: str) -> int:
    """Offer each node of these types to `change`, which may remove others; how often it said that it did."""
    editor = Editor(model)
    nodes = [node for node in model.graph if is_op(node, *op_types)]
    return sum(change(editor, node) for node in nodes if node.graph is model.graph)


def detach(node: ir.Node) -> None:
    """Withdraw every use that the node and the bodies inside it make of values."""
    node.resize_inputs(0)
    for body in bodies(node):
        for inner in body:
            detach(inner)


def name_nodes(graph: ir.Graph) -> int:
    """Name the nodes that have no name, or the name of an earlier one; returns how many."""
    taken: set[str] = set()
    pending = []
    for node in graph:
        if node.name and node.name not in taken:
            taken.add(node.name)
        else:
            pending.append(node)
    counters: dict[str, int] = {}
    for node in pending:
        while True:
            index = counters.get(node.op_type, 0)
            counters[node.op_type] = index + 1
            name = f"{node.op_type}_{index}"
            if name not in taken:
                break
        taken.add(name)
        node.name = name
    return len(pending)
