"""Current shapes and types on the values of a model, from ONNX's own inference."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from roundel.errors import ModelError

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
