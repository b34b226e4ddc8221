"""What a pass is: a small object with one job that says how often it did it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class PassReport:
    """What one pass did, and how long it took (shape refreshes it needed included)."""

    name: str
    rewrites: int
    seconds: float


class Pass(ABC):
    """A float-to-float rewrite of a model, in place.

    A pass changes only the main graph. It rewrites a place only after it has proved that no graph
    output and no other reader, captures inside If, Loop and Scan bodies included, can see a difference
    beyond the tolerance that its docstring states.

    Attributes:
        name: what reports call the pass.
        reads_shapes: whether it needs current shapes and types on the values.
    """

    name: ClassVar[str]
    reads_shapes: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, model: ir.Model) -> int:
        """Rewrite the model in place and return the number of rewrites."""


Attributes = Mapping[str, int | float | str | Sequence[int]]

_REAL = (np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64))


def opset(model: ir.Model) -> int:
    """Version of the default operator set."""
    imports = model.opset_imports
    return imports.get("", imports.get("ai.onnx", 1))


def is_op(node: ir.Node | None, *op_types: str) -> bool:
    """Whether the node is one of these standard operators."""
    return node is not None and node.domain == "" and node.op_type in op_types


def get_int(node: ir.Node, name: str, default: int) -> int:
    """An integer attribute, or its default."""
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def get_ints(node: ir.Node, name: str) -> tuple[int, ...] | None:
    """An integer-list attribute, or None where it is absent."""
    attribute = node.attributes.get(name)
    return None if attribute is None else tuple(attribute.as_ints())


def get_float(node: ir.Node, name: str, default: float) -> float:
    """A float attribute, or its default."""
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_float()


def get_string(node: ir.Node, name: str, default: str) -> str:
    """A string attribute, or its default."""
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_string()


def input_at(node: ir.Node, index: int) -> ir.Value | None:
    """The input at `index`; None where it is left out, by an empty name or by a short list."""
    return node.inputs[index] if index < len(node.inputs) else None


def producer(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """The node that makes the value, if it is one of these standard operators."""
    node = None if value is None else value.producer()
    return node if is_op(node, *op_types) else None


def constant(value: ir.Value | None) -> NDArray[Any] | None:
    """The array behind an initializer or a Constant node; None for anything a caller can feed."""
    if value is None or value.is_graph_input():
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def real_constant(value: ir.Value | None) -> NDArray[Any] | None:
    """The array behind a constant of 16, 32 or 64-bit floats."""
    array = constant(value)
    return array if array is not None and array.dtype in _REAL else None


def scalar(value: ir.Value | None) -> float | None:
    """The number in a one-element constant."""
    array = constant(value)
    if array is None or array.size != 1 or array.dtype.kind not in "fiu":
        return None
    return float(array.reshape(()))


def integers(value: ir.Value | None) -> tuple[int, ...] | None:
    """The numbers in an integer constant."""
    array = constant(value)
    if array is None or array.dtype.kind not in "iu":
        return None
    return tuple(int(x) for x in array.reshape(-1))


def dims(value: ir.Value | None) -> tuple[int | None, ...] | None:
    """Dimensions with None for an open one; None where even the rank is unknown."""
    if value is None or value.shape is None:
        return None
    # Some exporters write -1 for an open dimension.
    return tuple(d if isinstance(d, int) and d >= 0 else None for d in value.shape)


def same_rank(left: ir.Value, right: ir.Value) -> bool:
    """Whether both have the same, known number of dimensions: no constant on the way added any."""
    return left.shape is not None and right.shape is not None and len(left.shape) == len(right.shape)


def static_dims(value: ir.Value | None) -> tuple[int, ...] | None:
    """Dimensions, if every one is known."""
    known = dims(value)
    if known is None:
        return None
    sizes = tuple(d for d in known if d is not None)
    return sizes if len(sizes) == len(known) else None


def only_reader(value: ir.Value) -> ir.Node | None:
    """The one node that reads the value, once, in the value's own graph, if nothing else can see it."""
    uses = value.uses()
    if len(uses) != 1 or value.is_graph_output():
        return None
    (use,) = uses
    maker = value.producer()
    # A capture inside a body keeps its name there, and the body may run many times: not a plain reader.
    if maker is not None and use.node.graph is not maker.graph:
        return None
    return use.node


def is_private(nodes: Collection[ir.Node], last: ir.Node) -> bool:
    """Whether everything but the output of `last` is seen by these nodes only."""
    members = set(nodes)
    return all(
        not value.is_graph_output() and all(use.node in members for use in value.uses())
        for node in members
        if node is not last
        for value in node.outputs
    )


def operands(node: ir.Node) -> tuple[tuple[ir.Value, ir.Value], ...]:
    """Both orders of a two-input node, for operators where the order does not matter."""
    if len(node.inputs) != 2 or node.inputs[0] is None or node.inputs[1] is None:
        return ()
    left, right = node.inputs[0], node.inputs[1]
    return (left, right), (right, left)


def with_number(node: ir.Node | None, *op_types: str) -> tuple[ir.Value, float] | None:
    """The other operand and the number, for a commutative node with one scalar constant."""
    if node is None or not is_op(node, *op_types):
        return None
    for value, other in operands(node):
        number = scalar(other)
        # A constant of more dimensions than the tensor would add dimensions to it.
        if number is not None and len(dims(other) or ()) <= len(value.shape or ()):
            return value, number
    return None


def reduced_axes(node: ir.Node, rank: int | None) -> tuple[int, ...] | None:
    """Sorted, non-negative axes of a Reduce node with keepdims=1; None where they are not known."""
    if get_int(node, "keepdims", 1) != 1:
        return None
    return any_reduced_axes(node, rank)


def any_reduced_axes(node: ir.Node, rank: int | None) -> tuple[int, ...] | None:
    """Sorted, non-negative axes of a Reduce node, whatever its keepdims."""
    axes = get_ints(node, "axes")
    if axes is None:
        axes = integers(input_at(node, 1))
    if not axes or rank is None:
        return None
    return tuple(sorted({axis % rank for axis in axes}))


class Editor:
    """Edits the main graph of one model and keeps names unique over all its graphs."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.graph = model.graph
        self.opset = opset(model)
        self._names: set[str] | None = None

    def fresh(self, base: str) -> str:
        """A name that no value and no node of the model has yet."""
        if self._names is None:
            self._names = _all_names(self.model)
        name, count = base, 0
        while name in self._names:
            count += 1
            name = f"{base}_{count}"
        self._names.add(name)
        return name

    def initializer(self, base: str, array: NDArray[Any]) -> ir.Value:
        """A new initializer, named after `base`."""
        name = self.fresh(base)
        value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
        value.shape = ir.Shape(array.shape)
        value.dtype = ir.DataType.from_numpy(array.dtype)
        self.graph.register_initializer(value)
        return value

    def set_constant(self, node: ir.Node, index: int, array: NDArray[Any], base: str) -> None:
        """Give a node a constant input of its own.

        The initializer keeps its name where the node is its only reader. One that others read too is
        left as it is, and the node gets a new one.
        """
        value = input_at(node, index)
        if value is not None and value.is_initializer() and only_reader(value) is node:
            value.const_value = ir.tensor(array, name=value.name)
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

    def drop_all(self, nodes: Iterable[ir.Node]) -> None:
        """Remove nodes that only read each other."""
        for node in nodes:
            self.drop(node)


def detach(node: ir.Node) -> None:
    """Withdraw every use that the node and the bodies inside it make of values."""
    node.resize_inputs(0)
    for attribute in node.attributes.values():
        if attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.GRAPH:
            bodies: Iterable[ir.Graph] = (attribute.as_graph(),)
        elif attribute.type == ir.AttributeType.GRAPHS:
            bodies = attribute.as_graphs()
        else:
            continue
        for body in bodies:
            for inner in body:
                detach(inner)


def _all_names(model: ir.Model) -> set[str]:
    names: set[str] = set()
    for graph in model.graphs():
        names.update(value.name for value in graph.inputs if value.name)
        names.update(graph.initializers)
        for node in graph:
            if node.name:
                names.add(node.name)
            names.update(value.name for value in node.outputs if value.name)
    return names
