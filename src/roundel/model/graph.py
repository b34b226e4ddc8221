"""Questions that every room asks of a graph. All are O(1) or one walk; none changes anything."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.types import InputSpec

FLOAT_TYPES = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE})
DEFAULT_DOMAINS = ("", "ai.onnx")


def op_key(node: ir.Node) -> str:
    """'Conv' for the default domain, 'domain::Op' for any other."""
    return node.op_type if node.domain in DEFAULT_DOMAINS else f"{node.domain}::{node.op_type}"


def is_float32(value: ir.Value | None) -> bool:
    """Whether the value is known to be a float32 tensor: a sequence has an element type, too, and is none."""
    return value is not None and isinstance(value.type, ir.TensorType) and value.dtype is ir.DataType.FLOAT


def is_constant(value: ir.Value | None) -> bool:
    """Whether the value's content is known and no caller can replace it."""
    return value is not None and value.const_value is not None and not value.is_graph_input()


def constant_array(value: ir.Value | None) -> NDArray[Any] | None:
    """The content of a constant, or None."""
    if value is None or value.const_value is None or value.is_graph_input():
        return None
    return np.asarray(value.const_value.numpy())


def constant_scalar(value: ir.Value | None) -> float | None:
    """The content of a one-element constant, or None."""
    array = constant_array(value)
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None


def readers(value: ir.Value) -> list[tuple[ir.Node, int]]:
    """The (node, input index) pairs that read the value, subgraph captures included."""
    return [(use.node, use.idx) for use in value.uses()]


def only_reader(value: ir.Value) -> ir.Node | None:
    """The single node that reads the value, or None when it has several or is a graph output."""
    if value.is_graph_output():
        return None
    uses = value.uses()
    return next(iter(uses)).node if len(uses) == 1 else None


def static_shape(value: ir.Value | None) -> tuple[int, ...] | None:
    """The shape when every dimension is a known number."""
    if value is None or value.shape is None:
        return None
    dims = tuple(value.shape)
    return tuple(int(d) for d in dims) if all(isinstance(d, int) for d in dims) else None  # type: ignore[arg-type]


def rank(value: ir.Value | None) -> int | None:
    """The number of dimensions when known."""
    return None if value is None or value.shape is None else len(value.shape)


def attribute_ints(node: ir.Node, name: str) -> tuple[int, ...] | None:
    """An integer-list attribute, or None where the node does not carry it."""
    attr = node.attributes.get(name)
    return tuple(attr.as_ints()) if attr is not None else None


def attribute_int(node: ir.Node, name: str, default: int) -> int:
    """An integer attribute."""
    attr = node.attributes.get(name)
    return int(attr.as_int()) if attr is not None else default


def attribute_float(node: ir.Node, name: str, default: float) -> float:
    """A float attribute."""
    attr = node.attributes.get(name)
    return float(attr.as_float()) if attr is not None else default


def clip_bounds(node: ir.Node) -> tuple[float | None, float | None] | None:
    """(min, max) of a Clip with constant bounds; None where a bound is computed at run time."""
    bounds: list[float | None] = []
    for index, attribute in ((1, "min"), (2, "max")):
        value = node.inputs[index] if len(node.inputs) > index else None
        if value is None:
            attr = node.attributes.get(attribute)
            bounds.append(float(attr.as_float()) if attr is not None else None)
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
    found: dict[str, ir.Value] = {}
    for value in iter_values(graph):
        if value.name:
            found[value.name] = value
    return found


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
    return any(
        attr.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for attr in node.attributes.values()
    )


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


_PASSING = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})


def table_rows(graph: ir.Graph) -> dict[str, int]:
    """For each input whose values a Gather takes as indices: the rows of the smallest such table."""
    found: dict[str, int] = {}
    for value in graph.inputs:
        sizes = _sizes(value)
        if sizes:
            found[str(value.name)] = min(sizes)
    return found


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
