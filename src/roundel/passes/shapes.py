"""Current shapes and types on the values of a model, from ONNX's own inference."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
import onnx_ir as ir

from roundel.errors import ModelError, RecipeError, did_you_mean

# Inference reads the contents of shape-like tensors only. Anything longer travels as a mere type, so the
# message stays small for a model of any size.
_CONTENT_LIMIT = 1024


def refresh_shapes(model: ir.Model) -> None:
    """Infer shapes and types anew, from the graph inputs on.

    Known sizes win over open ones, and a size just inferred wins over one that the file declared. Values
    that inference cannot reach (behind operators of a custom domain, for example) keep what they have.

    Raises:
        ModelError: the graph is so broken that ONNX cannot walk it.
    """
    try:
        inferred = onnx.shape_inference.infer_shapes(_skeleton(model), data_prop=True).graph
    except onnx.shape_inference.InferenceError as error:
        raise ModelError(
            "The shapes of the model cannot be inferred.",
            where=model.graph.name or "main graph",
            observed=str(error).strip(),
            hint="Check the model with onnx.checker.check_model, then export it again.",
        ) from error
    found = {info.name: info.type for info in (*inferred.value_info, *inferred.output)}
    for value in _values(model.graph):
        if value.name and (inferred_type := found.get(value.name)) is not None:
            _merge(value, inferred_type)


def _values(graph: ir.Graph) -> list[ir.Value]:
    made = [value for node in graph for value in node.outputs]
    return [*made, *(value for value in graph.outputs if value.producer() is None)]


def _skeleton(model: ir.Model) -> onnx.ModelProto:
    """The model without its weights."""
    proto = onnx.ModelProto(ir_version=max(model.ir_version, 8))
    for domain, version in model.opset_imports.items():
        proto.opset_import.add(domain=domain, version=version)
    graph = proto.graph
    graph.name = model.graph.name or "graph"
    for value in model.graph.inputs:
        if not value.is_initializer():
            _add_input(graph, value, value.shape)
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.nbytes <= _CONTENT_LIMIT:
            tensor.name = value.name
            ir.serde.serialize_tensor_into(graph.initializer.add(), tensor)
        elif tensor is not None:
            value.dtype = tensor.dtype
            _add_input(graph, value, ir.Shape(tensor.shape.numpy()))
    for node in model.graph:
        _add_node(graph, node)
    for value in model.graph.outputs:
        info = graph.output.add(name=value.name or "")
        if value.type is not None:
            ir.serde.serialize_type_into(info.type, value.type)
    for function in model.functions.values():
        ir.serde.serialize_function_into(proto.functions.add(), function)
    return proto


def _add_node(graph: onnx.GraphProto, node: ir.Node) -> None:
    if node.domain == "" and node.op_type == "Constant":
        tensor = ir.convenience.get_const_tensor(node.outputs[0])
        if tensor is not None and tensor.nbytes > _CONTENT_LIMIT:
            node.outputs[0].dtype = tensor.dtype
            _add_input(graph, node.outputs[0], ir.Shape(tensor.shape.numpy()))
            return
    ir.serde.serialize_node_into(graph.node.add(), node)
    if node.domain:
        # Inference knows nothing of a custom operator: what the file says of its outputs is all there is.
        for value in node.outputs:
            if value.type is not None and value.shape is not None and not value.is_graph_output():
                ir.serde.serialize_value_into(graph.value_info.add(), value)


def _add_input(graph: onnx.GraphProto, value: ir.Value, shape: ir.Shape | None) -> None:
    info = graph.input.add(name=value.name or "")
    if value.type is None:
        return
    ir.serde.serialize_type_into(info.type, value.type)
    # A negative size stands for an open dimension in some files; inference must not compute with it.
    if shape is not None:
        open_where_negative = [None if isinstance(d, int) and d < 0 else d for d in shape]
        ir.serde.serialize_shape_into(info.type, ir.Shape(open_where_negative))


def _merge(value: ir.Value, inferred: onnx.TypeProto) -> None:
    if not inferred.HasField("tensor_type"):
        if value.type is None and inferred.WhichOneof("value") is not None:
            value.type = ir.serde.deserialize_type_proto_for_type(inferred)
        return
    tensor = inferred.tensor_type
    if tensor.elem_type and value.dtype != tensor.elem_type:
        value.type = ir.TensorType(ir.DataType(tensor.elem_type))
    if not tensor.HasField("shape"):
        return
    old: list[object] = list(value.shape) if value.shape is not None else []
    merged: list[int | str | None] = []
    for index, dim in enumerate(tensor.shape.dim):
        before = old[index] if len(old) == len(tensor.shape.dim) else None
        if dim.HasField("dim_value"):
            merged.append(dim.dim_value)
        elif isinstance(before, int) and before >= 0:
            merged.append(before)
        elif isinstance(before, ir.SymbolicDim) and before.value is not None:
            merged.append(before.value)
        else:
            merged.append(dim.dim_param or None)
    value.shape = ir.Shape(merged)


# Exporters write these for dimensions that have nothing to do with each other.
_ANONYMOUS = frozenset({"", "?", "None", "-1"})


def fix_input_shapes(model: ir.Model, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Fixes the shapes of graph inputs, by input name or by the name of an open dimension. Exact for
    data of that shape.

    A dimension name that one input fixes is fixed everywhere it appears.

    Args:
        shapes: sizes by input name (`{"image": (1, 3, 224, 224)}`) or by dimension name (`{"batch": (1,)}`).
    """
    inputs = {v.name: v for v in model.graph.inputs if v.name and not v.is_initializer()}
    symbols = {name for value in inputs.values() for name in _symbols(value)}
    bindings: dict[str, int] = {}
    count = 0
    for key, sizes in shapes.items():
        _check_sizes(key, sizes)
        if key in inputs:
            count += _fix(inputs[key], sizes, bindings)
        elif key in symbols:
            if len(sizes) != 1:
                raise RecipeError(
                    f"'{key}' names one dimension, so it takes one size.",
                    where=f"fixed_shapes.{key}",
                    observed=_text(sizes),
                    expected="one size, such as [1]",
                )
            _bind(bindings, key, sizes[0])
        else:
            raise _unknown(key, set(inputs), symbols)
    for node in model.graph:
        for value in node.outputs:
            _apply(value, bindings)
    return count + sum(_apply(value, bindings) for value in inputs.values())


def _check_sizes(key: str, sizes: tuple[int, ...]) -> None:
    if any(size < 1 for size in sizes):
        raise RecipeError(
            "A fixed size must be at least 1.",
            where=f"fixed_shapes.{key}",
            observed=_text(sizes),
            expected="positive sizes for all dimensions",
        )


def _fix(value: ir.Value, sizes: tuple[int, ...], bindings: dict[str, int]) -> bool:
    before = value.shape
    if before is not None:
        agrees = len(before) == len(sizes) and all(
            not isinstance(d, int) or d < 0 or d == size for d, size in zip(before, sizes, strict=True)
        )
        if not agrees:
            raise RecipeError(
                f"The fixed shape of input '{value.name}' contradicts the model.",
                where=f"fixed_shapes.{value.name}",
                observed=_text(sizes),
                expected=f"{_text(tuple(before))} as the model declares it",
                hint="Give the declared sizes, and choose only those of the open dimensions.",
            )
        for dim, size in zip(before, sizes, strict=True):
            if (name := _symbol(dim)) is not None:
                _bind(bindings, name, size)
    value.shape = ir.Shape(sizes)
    return before is None or tuple(before) != sizes


def _bind(bindings: dict[str, int], name: str, size: int) -> None:
    if bindings.setdefault(name, size) != size:
        raise RecipeError(
            f"Dimension '{name}' is fixed to two sizes.",
            where="fixed_shapes",
            observed=f"{bindings[name]} and {size}",
            expected="the same size wherever the dimension appears",
        )


def _apply(value: ir.Value, bindings: Mapping[str, int]) -> bool:
    if value.shape is None or not bindings:
        return False
    fixed = [bindings.get(_symbol(dim) or "", dim) for dim in value.shape]
    if fixed == list(value.shape):
        return False
    value.shape = ir.Shape(fixed)
    return True


def _symbols(value: ir.Value) -> set[str]:
    return {name for dim in value.shape or () if (name := _symbol(dim)) is not None}


def _symbol(dim: object) -> str | None:
    """The name of an open dimension that means something."""
    name = dim.value if isinstance(dim, ir.SymbolicDim) else None
    return None if name in _ANONYMOUS else name


def _unknown(key: str, inputs: set[str], symbols: set[str]) -> RecipeError:
    return RecipeError(
        f"The model has no input and no open dimension called '{key}'.",
        where=f"fixed_shapes.{key}",
        expected=f"an input ({', '.join(sorted(inputs)) or 'none'}) "
        f"or an open dimension ({', '.join(sorted(symbols)) or 'none'})",
        hint=did_you_mean(key, inputs | symbols),
    )


def _text(sizes: tuple[object, ...]) -> str:
    return "[" + ", ".join("?" if str(size) in ("None", "?") else str(size) for size in sizes) + "]"
