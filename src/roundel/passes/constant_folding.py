"""What depends on constants only is computed now."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.model.edit import Editor
from roundel.model.graph import attribute_int, constant_array, input_at, integers, producer, static_shape
from roundel.passes.shapes import refresh_shapes

# The file must not grow much: a result is kept if it is small, or holds no more elements than the
# constants that disappear with it.
_SMALL_BYTES = 1 << 20
_TOTAL_SMALL_BYTES = 1 << 26

# Folding one layer of shape arithmetic lets inference see the next. Real exports need two or three rounds.
_MAX_ROUNDS = 8

_NEVER = frozenset(
    {
        "Bernoulli",
        "Constant",
        "DequantizeLinear",
        "Dropout",
        "DynamicQuantizeLinear",
        "Multinomial",
        "QuantizeLinear",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
    }
)

_PLAIN = frozenset(
    ir.DataType.from_numpy(np.dtype(name))
    for name in (
        *("float16", "float32", "float64", "bool"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    )
)


def fold_constants(model: ir.Model) -> int:
    """Computes every node whose inputs are constant, and shapes that are known. Exact.

    ONNX Runtime itself computes the values, all nodes of a round in one session. Random operators,
    quantize and dequantize nodes, control flow and nodes that make a graph output stay; so do results
    that would bloat the file.
    """
    editor = Editor(model)
    refused: set[ir.Node] = set()
    total = 0
    for _ in range(_MAX_ROUNDS):
        refresh_shapes(model)
        found = _Selection(refused)
        for node in model.graph:
            found.consider(node)
        folded = _fold(editor, found)
        total += folded
        if not folded:
            break
    return total


@dataclass
class _Selection:
    """The nodes of one round that can be computed, in order."""

    refused: set[ir.Node]
    nodes: dict[ir.Node, None] = field(default_factory=dict)
    known: dict[ir.Value, NDArray[Any]] = field(default_factory=dict)
    small_bytes: int = 0

    def consider(self, node: ir.Node) -> None:
        if node.domain != "" or node.op_type in _NEVER or node in self.refused:
            return
        if any(value.is_graph_output() for value in node.outputs):
            return
        shape = _known_shape(node)
        if shape is not None:
            self.known[node.outputs[0]] = shape
        elif self._is_computable(node) and self._is_affordable(node):
            self.nodes[node] = None

    def _is_computable(self, node: ir.Node) -> bool:
        inputs = [value for value in node.inputs if value is not None]
        has_body = any(
            attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
            for attribute in node.attributes.values()
        )
        return (
            bool(inputs)
            and not has_body
            and all(self._is_constant(value) for value in inputs)
            and all(value.dtype in _PLAIN for value in (*inputs, *node.outputs) if value.name)
        )

    def _is_constant(self, value: ir.Value) -> bool:
        if value in self.known or value.producer() in self.nodes:
            return True
        return value.is_initializer() and not value.is_graph_input() and value.const_value is not None

    def _is_affordable(self, node: ir.Node) -> bool:
        elements = size = 0
        for value in node.outputs:
            shape = static_shape(value)
            if not value.name:
                continue
            if shape is None or value.dtype is None:
                return False
            elements += math.prod(shape)
            size += math.ceil(math.prod(shape) * value.dtype.itemsize)
        freed = {v for v in node.inputs if v is not None and len(v.consumers()) == 1}
        if elements <= sum(math.prod(static_shape(value) or (0,)) for value in freed):
            return True
        self.small_bytes += size
        return size <= _SMALL_BYTES and self.small_bytes <= _TOTAL_SMALL_BYTES


def _known_shape(node: ir.Node) -> NDArray[np.int64] | None:
    """The value of Shape or Size, or of a Gather or Slice that reads only known entries of a Shape."""
    if node.op_type in ("Shape", "Size"):
        shape = static_shape(input_at(node, 0))
        if shape is None:
            return None
        return np.array(math.prod(shape) if node.op_type == "Size" else _cut(node, shape), dtype=np.int64)
    source = producer(input_at(node, 0), "Shape")
    picked = None if source is None else _picked(node, source)
    if picked is None or any(not isinstance(d, int) or d < 0 for d in picked.reshape(-1)):
        return None
    return picked.astype(np.int64)


def _cut(node: ir.Node, shape: tuple[object, ...]) -> tuple[object, ...]:
    end = node.attributes.get("end")
    return shape[attribute_int(node, "start", 0) : None if end is None else end.as_int()]


def _picked(node: ir.Node, source: ir.Node) -> NDArray[Any] | None:
    value = source.inputs[0]
    if value is None or value.shape is None:
        return None
    entries = np.array([*_cut(source, tuple(value.shape)), None], dtype=object)[:-1]
    if node.op_type == "Gather":
        indices = constant_array(input_at(node, 1))
        if indices is None or np.any(indices >= len(entries)) or np.any(indices < -len(entries)):
            return None
        return np.asarray(entries[indices], dtype=object)
    if node.op_type == "Slice" and len(node.inputs) >= 3:
        starts, ends = integers(node.inputs[1]), integers(node.inputs[2])
        steps = integers(input_at(node, 4)) if input_at(node, 4) is not None else (1,)
        if starts and ends and steps and steps[0] > 0:
            return entries[starts[0] : ends[0] : steps[0]]
    return None


def _fold(editor: Editor, found: _Selection) -> int:
    for value, array in found.known.items():
        node = value.producer()
        assert node is not None, "only computed values are in here"
        _to_initializer(editor, value, ir.tensor(array))
        editor.drop(node)
    nodes = list(found.nodes)
    if not nodes:
        return len(found.known)
    if _replace(editor, nodes):
        return len(found.known) + len(nodes)
    # One operator that ONNX Runtime lacks must not keep the others from being folded.
    count = len(found.known)
    for node in nodes:
        if all(value is None or value.is_initializer() for value in node.inputs):
            if _replace(editor, [node]):
                count += 1
            else:
                found.refused.add(node)
    return count


def _to_initializer(editor: Editor, value: ir.Value, tensor: ir.TensorProtocol) -> None:
    """Put an initializer with this content where a computed value stood, under its name."""
    name = value.name or editor.fresh("constant")
    value.name = None
    tensor.name = name
    fixed = ir.Value(name=name, const_value=tensor)
    fixed.shape = ir.Shape(tensor.shape.numpy())
    fixed.dtype = tensor.dtype
    fixed.metadata_props.update(value.metadata_props)
    value.replace_all_uses_with(fixed)
    editor.graph.register_initializer(fixed)


def _replace(editor: Editor, nodes: list[ir.Node]) -> bool:
    results = _evaluate(editor.model, nodes)
    if results is None:
        return False
    for value, array in results.items():
        _to_initializer(editor, value, ir.tensor(array))
    for node in reversed(nodes):
        editor.drop(node)
    return True


def _evaluate(model: ir.Model, nodes: list[ir.Node]) -> dict[ir.Value, NDArray[Any]] | None:
    """Values that nodes outside the list read, or None where ONNX Runtime cannot run the list."""
    import onnxruntime as ort
    from onnxruntime.capi import onnxruntime_pybind11_state as status

    members = set(nodes)
    proto = onnx.ModelProto(ir_version=max(model.ir_version, 8))
    for domain, version in model.opset_imports.items():
        proto.opset_import.add(domain=domain, version=version)
    proto.graph.name = "constants"
    feeds: dict[str, NDArray[Any]] = {}
    wanted: list[ir.Value] = []
    for node in nodes:
        ir.serde.serialize_node_into(proto.graph.node.add(), node)
        for value in node.inputs:
            if value is not None and value.producer() not in members and value.name not in feeds:
                assert value.name, "initializers have names"
                assert value.const_value is not None, "initializers have contents"
                feeds[value.name] = np.asarray(value.const_value.numpy(), order="C")
                ir.serde.serialize_value_into(proto.graph.input.add(), value)
        wanted.extend(v for v in node.outputs if any(use.node not in members for use in v.uses()))
    if not wanted:
        return {}
    for value in wanted:
        ir.serde.serialize_value_into(proto.graph.output.add(), value)
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
        arrays = session.run([value.name for value in wanted], feeds)
    except (
        status.Fail,
        status.InvalidArgument,
        status.InvalidGraph,
        status.NotImplemented,
        status.RuntimeException,
    ):
        return None
    return dict(zip(wanted, arrays, strict=True))
