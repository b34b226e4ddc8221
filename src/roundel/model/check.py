"""Whether a graph hangs together: what onnx-ir reads without complaint and later steps would stumble over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import onnx
import onnx_ir as ir

from roundel.errors import ModelError
from roundel.model.graph import op_key

_MOST = 2**31 - 1
_BROKEN = "The file may be damaged: export or download the model again."


def check_structure(model: ir.Model, where: object) -> None:
    """Refuse a model whose names, connections, attributes or weights contradict each other.

    Raises:
        ModelError: with the node or tensor concerned.
    """
    imports = model.graph.opset_imports
    _check_text((*imports, *model.graph.initializers), "domain or initializer name", where)
    _check_versions(model, where)
    for graph in (model.graph, *model.graph.subgraphs()):
        _check_names(graph, where)
        for node in graph:
            _check_inputs(node, where)
            _check_attributes(node, imports, where)
    for value in model.graph.outputs:
        if _undefined(value):
            raise _broken(
                f"{where}, graph output '{value.name}'", "nothing makes it", "a node's output or an input"
            )
    for value in model.graph.initializers.values():
        _check_size(value, where)


def _check_versions(model: ir.Model, where: object) -> None:
    if not 1 <= model.ir_version <= _MOST:
        raise _broken(where, f"IR version {model.ir_version}", "3 or more")
    for domain, version in model.graph.opset_imports.items():
        if not 1 <= version <= _MOST:
            raise _broken(where, f"version {version} of operator set '{domain}'", "1 or more")


def _check_names(graph: ir.Graph | ir.Function, where: object) -> None:
    made = [*graph.inputs, *(value for node in graph for value in node.outputs)]
    for name, count in Counter(value.name for value in made if value.name).items():
        _check_text((name,), "tensor name", where)
        if count > 1:
            raise _broken(f"{where}, tensor '{name}'", f"{count} nodes or inputs make it", "exactly one")


def _check_text(texts: Iterable[object], what: str, where: object) -> None:
    # Protobuf hands out bytes where a string is not UTF-8.
    for text in texts:
        if isinstance(text, bytes):
            raise _broken(where, f"the {what} {text!r}", "UTF-8 text")


def _check_inputs(node: ir.Node, where: object) -> None:
    _check_text((node.name, node.op_type, node.domain), "node name or type", where)
    for value in node.inputs:
        if value is not None and _undefined(value):
            raise _broken(
                f"{where}, {op_key(node)} node '{node.name}'",
                f"it reads tensor '{value.name}', which nothing makes",
                "a graph input, an initializer or another node's output",
            )


def _undefined(value: ir.Value) -> bool:
    return value.producer() is None and not value.is_graph_input() and not value.is_initializer()


def _check_attributes(node: ir.Node, imports: dict[str, int], where: object) -> None:
    """Names, and types where ONNX has a schema for the operator; ONNX Runtime judges the rest."""
    for name, attr in node.attributes.items():
        _check_text((name,), "attribute name", where)
        if not name or attr.type is ir.AttributeType.UNDEFINED:
            raise _broken(
                f"{where}, {op_key(node)} node '{node.name}'",
                f"an attribute named {name!r} of type {attr.type.name}",
                "a name and a type",
            )
    domain = "" if node.domain == "ai.onnx" else node.domain
    try:
        schema = onnx.defs.get_schema(node.op_type, imports.get(domain, imports.get("ai.onnx", 1)), domain)
    except onnx.defs.SchemaError:
        return
    known = schema.attributes
    for name, attr in node.attributes.items():
        if name not in known or attr.is_ref():
            continue
        seen, wanted = attr.type.name, str(known[name].type).rpartition(".")[2]
        if seen != wanted:
            raise _broken(
                f"{where}, {op_key(node)} node '{node.name}'",
                f"attribute '{name}' has type {seen}",
                f"type {wanted}",
            )


def _check_size(value: ir.Value, where: object) -> None:
    tensor = value.const_value
    if not isinstance(tensor, ir.TensorProtoTensor) or tensor.dtype is ir.DataType.STRING:
        return
    try:
        tensor.numpy()
    except (ValueError, TypeError, AssertionError) as error:  # onnx-ir asserts which field holds the data
        raise _broken(
            f"{where}, initializer '{value.name}'",
            str(error) or "data in a field of another type",
            f"the data of {tensor.dtype.name.lower()} {tensor.shape}",
        ) from error


def _broken(where: object, observed: object, expected: object) -> ModelError:
    return ModelError(
        "The model contradicts itself.", where=where, observed=observed, expected=expected, hint=_BROKEN
    )
