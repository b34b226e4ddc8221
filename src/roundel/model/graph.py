"""Questions that every room asks of a graph. All are O(1) or one walk; none changes anything."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator

import numpy as np
import onnx_ir as ir

from roundel.targets.operators import Trait, ops_with
from roundel.types import Array, InputSpec

FLOAT_TYPES = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE})
DEFAULT_DOMAINS = ("", "ai.onnx")
_REAL = (np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64))
_NO_NUMBERS = "bOSU"  # kinds of numpy


def op_key(node: ir.Node) -> str:
    """'Conv' for the default domain, 'domain::Op' for any other."""
    return node.op_type if node.domain in DEFAULT_DOMAINS else f"{node.domain}::{node.op_type}"


def is_op(node: ir.Node | None, *op_types: str) -> bool:
    """Whether the node is one of these standard operators."""
    return node is not None and node.domain == "" and node.op_type in op_types


def is_float32(value: ir.Value | None) -> bool:
    """Whether the value is known to be a float32 tensor: a sequence has an element type, too, and is none."""
    return value is not None and isinstance(value.type, ir.TensorType) and value.dtype is ir.DataType.FLOAT


def is_constant(value: ir.Value | None) -> bool:
    """Whether the value is stored in the model and no caller can replace it."""
    return value is not None and value.const_value is not None and not value.is_graph_input()


def constant_array(value: ir.Value | None) -> Array | None:
    """The array behind an initializer or a Constant node; None for anything a caller can feed."""
    if value is None or value.is_graph_input():
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else np.asarray(tensor.numpy())


def real_constant(value: ir.Value | None) -> Array | None:
    """The array behind a constant of 16, 32 or 64-bit floats."""
    array = constant_array(value)
    return array if array is not None and array.dtype in _REAL else None


def constant_scalar(value: ir.Value | None) -> float | None:
    """The number in a one-element constant."""
    array = constant_array(value)
    if array is None or array.size != 1 or array.dtype.kind in _NO_NUMBERS:
        return None
    return float(array.reshape(()))


def integers(value: ir.Value | None) -> tuple[int, ...] | None:
    """The numbers in an integer constant."""
    array = constant_array(value)
    if array is None or array.dtype.kind not in "iu":
        return None
    return tuple(int(x) for x in array.reshape(-1))


def input_at(node: ir.Node, index: int) -> ir.Value | None:
    """The input at `index`; None where it is left out, by an empty name or by a short list."""
    return node.inputs[index] if index < len(node.inputs) else None


def producer(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """The node that makes the value, if it is one of these standard operators."""
    node = None if value is None else value.producer()
    return node if is_op(node, *op_types) else None


def readers(value: ir.Value) -> list[tuple[ir.Node, int]]:
    """The (node, input index) pairs that read the value, subgraph captures included."""
    return [(use.node, use.idx) for use in value.uses()]


def only_reader(value: ir.Value) -> ir.Node | None:
    """The one node that reads the value, once, in the value's own graph, if nothing else can see it."""
    uses = value.uses()
    if len(uses) != 1 or value.is_graph_output():
        return None
    (use,) = uses
    # A capture inside a body keeps its name there, and the body may run many times: not a plain reader.
    return use.node if use.node.graph is value.graph else None


def is_private(nodes: Collection[ir.Node], last: ir.Node) -> bool:
    """Whether everything but the output of `last` is seen by these nodes only."""
    members = set(nodes)
    return all(
        not value.is_graph_output() and all(use.node in members for use in value.uses())
        for node in members
        if node is not last
        for value in node.outputs
    )


def replaceable(source: ir.Value, nodes: Collection[ir.Node], last: ir.Node) -> bool:
    """Whether one node that reads the source may stand for all of these."""
    return same_rank(source, last.outputs[0]) and is_private(nodes, last)


def dims(value: ir.Value | None) -> tuple[int | None, ...] | None:
    """Dimensions with None for an open one; None where even the rank is unknown."""
    if value is None or value.shape is None:
        return None
    # Some exporters write -1 for an open dimension.
    return tuple(d if isinstance(d, int) and d >= 0 else None for d in value.shape)


def static_shape(value: ir.Value | None) -> tuple[int, ...] | None:
    """Dimensions, if every one is known."""
    known = dims(value)
    sizes = tuple(d for d in known or () if d is not None)
    return sizes if known is not None and len(sizes) == len(known) else None


def rank(value: ir.Value | None) -> int | None:
    """The number of dimensions when known."""
    return None if value is None or value.shape is None else len(value.shape)


def same_rank(left: ir.Value, right: ir.Value) -> bool:
    """Whether both have the same, known number of dimensions: no constant on the way added any."""
    return left.shape is not None and right.shape is not None and len(left.shape) == len(right.shape)


def attribute_int(node: ir.Node, name: str, default: int) -> int:
    """An integer attribute, or its default."""
    attr = node.attributes.get(name)
    return default if attr is None else int(attr.as_int())


def attribute_ints(node: ir.Node, name: str) -> tuple[int, ...] | None:
    """An integer-list attribute, or None where the node does not carry it."""
    attr = node.attributes.get(name)
    return None if attr is None else tuple(attr.as_ints())


def attribute_float(node: ir.Node, name: str, default: float) -> float:
    """A float attribute, or its default."""
    attr = node.attributes.get(name)
    return default if attr is None else float(attr.as_float())


def attribute_string(node: ir.Node, name: str, default: str) -> str:
    """A string attribute, or its default."""
    attr = node.attributes.get(name)
    return default if attr is None else attr.as_string()


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
        number = constant_scalar(other)
        # A constant of more dimensions than the tensor would add dimensions to it.
        if number is not None and len(dims(other) or ()) <= len(value.shape or ()):
            return value, number
    return None


def reduced_axes(node: ir.Node, rank: int | None) -> tuple[int, ...] | None:
    """Sorted, non-negative axes of a Reduce node with keepdims=1; None where they are not known."""
    return any_reduced_axes(node, rank) if attribute_int(node, "keepdims", 1) == 1 else None


def any_reduced_axes(node: ir.Node, rank: int | None) -> tuple[int, ...] | None:
    """Sorted, non-negative axes of a Reduce node, whatever its keepdims."""
    axes = attribute_ints(node, "axes")
    if axes is None:
        axes = integers(input_at(node, 1))
    if not axes or rank is None:
        return None
    return tuple(sorted({axis % rank for axis in axes}))


def clip_bounds(node: ir.Node) -> tuple[float | None, float | None] | None:
    """(min, max) of a Clip with constant bounds; None where a bound is computed at run time."""
    bounds: list[float | None] = []
    for index, attribute in ((1, "min"), (2, "max")):
        value, attr = input_at(node, index), node.attributes.get(attribute)
        if value is None:
            bounds.append(None if attr is None else float(attr.as_float()))
            continue
        scalar = constant_scalar(value)
        if scalar is None:
            return None
        bounds.append(scalar)
    return bounds[0], bounds[1]


def opset_version(model: ir.Model) -> int:
    """The default domain's opset."""
    imports = model.graph.opset_imports
    return int(imports.get("", imports.get("ai.onnx", 0)))


def values_by_name(graph: ir.Graph) -> dict[str, ir.Value]:
    """Every named value of the main graph: inputs, initializers and node outputs."""
    return {value.name: value for value in iter_values(graph) if value.name}


def iter_values(graph: ir.Graph) -> Iterator[ir.Value]:
    """Inputs, initializers, then node outputs in graph order."""
    yield from graph.inputs
    for value in graph.initializers.values():
        if not value.is_graph_input():
            yield value
    for node in graph:
        yield from node.outputs


def has_subgraph(node: ir.Node) -> bool:
    """Whether the node carries a body (If, Loop, Scan)."""
    return any(True for _ in bodies(node))


def bodies(node: ir.Node) -> Iterator[ir.Graph]:
    """The graphs inside the node (If, Loop, Scan)."""
    for attribute in node.attributes.values():
        if attribute.is_ref():
            continue
        if attribute.type is ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type is ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def input_specs(model: ir.Model) -> tuple[InputSpec, ...]:
    """What the caller must feed: graph inputs that no initializer provides."""
    specs = []
    for value in model.graph.inputs:
        if value.name in model.graph.initializers:
            continue
        dtype = np.dtype(value.dtype.numpy()) if value.dtype is not None else np.dtype(np.float32)
        shape = None if value.shape is None else tuple(_dim(d) for d in value.shape)
        specs.append(InputSpec(value.name or "", dtype, shape))
    return tuple(specs)


def _dim(dim: object) -> int | str | None:
    if isinstance(dim, int):
        return dim if dim >= 0 else None  # some exporters write -1 for an open dimension
    name = getattr(dim, "value", None)
    return str(name) if name else None


def weight_bytes(model: ir.Model) -> int:
    """Bytes of all initializers, without reading them."""
    return sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)


def fingerprint(model: ir.Model) -> str:
    """A digest of structure and weights: equal for equal models, whatever file they came from."""
    digest = hashlib.blake2b(digest_size=16)
    for value in model.graph.inputs:
        digest.update(f"in {value.name} {value.dtype} {value.shape}\n".encode())
    for name, value in sorted(model.graph.initializers.items()):
        digest.update(f"init {name} {value.dtype} {value.shape}\n".encode())
        if value.const_value is not None and value.dtype is not ir.DataType.STRING:
            digest.update(np.ascontiguousarray(value.const_value.numpy()).view(np.uint8).data)
    for node in model.graph:
        digest.update(f"{node.domain}:{node.op_type} {[v.name if v else None for v in node.inputs]}".encode())
        digest.update(f" {[v.name for v in node.outputs]} {sorted(_attributes(node))}\n".encode())
    digest.update(f"out {[v.name for v in model.graph.outputs]}".encode())
    return digest.hexdigest()


def _attributes(node: ir.Node) -> list[tuple[str, str]]:
    plain = []
    for name, attr in node.attributes.items():
        if attr.type is ir.AttributeType.TENSOR:
            plain.append((name, str(attr.as_tensor().numpy().tobytes())))
        elif attr.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
            plain.append((name, "graph"))
        else:
            plain.append((name, str(attr.value)))
    return plain


def upstream(graph: ir.Graph, starts: Iterable[ir.Node]) -> set[ir.Node]:
    """These nodes and all that they are made from."""
    return _reached(graph, starts, lambda node: node.predecessors())


def downstream(graph: ir.Graph, starts: Iterable[ir.Node]) -> set[ir.Node]:
    """These nodes and all that is made from them."""
    return _reached(graph, starts, lambda node: node.successors())


def around(graph: ir.Graph, starts: Iterable[ir.Node], within: set[ir.Node]) -> set[ir.Node]:
    """These nodes and all that hang together with them by nodes of a given set."""
    return within & _reached(
        graph, starts, lambda node: (n for n in (*node.predecessors(), *node.successors()) if n in within)
    )


def _reached(
    graph: ir.Graph, starts: Iterable[ir.Node], onward: Callable[[ir.Node], Iterable[ir.Node]]
) -> set[ir.Node]:
    found, stack = set[ir.Node](), list(starts)
    while stack:
        node = stack.pop()
        if node.graph is graph and node not in found:
            found.add(node)
            stack += onward(node)
    return found


_PASSING = ops_with(Trait.SHAPES | Trait.CASTS)


def table_rows(graph: ir.Graph) -> dict[str, int]:
    """For each input whose values a Gather takes as indices: the rows of the smallest such table."""
    sizes = {str(value.name): _sizes(value) for value in graph.inputs}
    return {name: min(found) for name, found in sizes.items() if found}


def _sizes(start: ir.Value) -> list[int]:
    sizes: list[int] = []
    waiting, seen = [start], {start}
    while waiting:
        value = waiting.pop()
        for node, place in value.uses():
            if node.op_type == "Gather" and place == 1:
                sizes += _rows(node)
            elif node.op_type in _PASSING and place == 0:
                fresh = [out for out in node.outputs if out not in seen]
                waiting += fresh
                seen.update(fresh)
    return sizes


def _rows(node: ir.Node) -> list[int]:
    table, axis = node.inputs[0], attribute_int(node, "axis", 0)
    shape = None if table is None else table.shape
    if shape is None or not -len(shape) <= axis < len(shape):
        return []
    size = shape[axis]
    return [size] if isinstance(size, int) and size > 0 else []
