"""What does nothing goes, what depends on constants only is computed, each layer gets its own constants."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import common
from onnxruntime.capi import onnxruntime_pybind11_state as ort

from roundel.errors import ModelError
from roundel.model import graph
from roundel.model.edit import Editor, rewrite
from roundel.model.session import open_session
from roundel.passes.shapes import refresh_shapes


def lift_constants(model: ir.Model) -> int:
    """Turns Constant nodes into initializers of the same name. Exact.

    A constant that is itself a graph output stays a node.
    """
    before = len(model.graph)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    return before - len(model.graph)


def remove_dead_code(model: ir.Model) -> int:
    """Removes nodes, initializers and functions that no graph output depends on. Exact.

    onnx-ir's pass for nodes forgets what the body of a removed node read, and empties outputs of others.
    """
    editor, before = Editor(model), _size(model)
    # Readers come after what they read, so one walk from the end meets every reader first.
    for node in reversed(model.graph):
        if not any(value.uses() or value.is_graph_output() for value in node.outputs):
            editor.drop(node)
    for name, value in list(model.graph.initializers.items()):
        if not (value.uses() or value.is_graph_output() or value.is_graph_input()):
            del model.graph.initializers[name]
    common.RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
    return before - _size(model)


def _size(model: ir.Model) -> int:
    return len(model.graph) + len(model.graph.initializers) + len(model.functions)


# Dropout has no training switch between these versions: it is the identity.
_DROPOUT_SWITCH_IN, _DROPOUT_SWITCH_OUT = 12, 7


def remove_no_ops(model: ir.Model) -> int:
    """Removes nodes whose output is their first input, bit for bit. Exact.

    Identity, Dropout in inference, Cast to the same type, Transpose that keeps the order, Pad by zero,
    Reshape or Expand to the same known shape, and Concat of one tensor. A node stays where both its input
    and its output have names that callers rely on.
    """
    editor = Editor(model)
    return sum(_bypass(editor, node) for node in model.graph if _is_no_op(node, editor.opset))


def _is_no_op(node: ir.Node, opset: int) -> bool:
    source = graph.input_at(node, 0)
    if node.domain != "" or source is None or not node.outputs:
        return False
    match node.op_type:
        case "Identity":
            return True
        case "Dropout":
            return _is_inference_dropout(node, opset)
        case "Cast":
            return source.dtype is not None and graph.attribute_int(node, "to", -1) == source.dtype
        case "Transpose":
            perm = graph.attribute_ints(node, "perm")
            return perm is not None and perm == tuple(range(len(perm)))
        case "Pad":
            given = graph.input_at(node, 1)
            pads = graph.attribute_ints(node, "pads") if opset < 11 else graph.integers(given)
            return pads is not None and not any(pads)
        case "Reshape" | "Expand":
            shape = graph.static_shape(source)
            return shape is not None and shape == graph.static_shape(node.outputs[0])
        case "Concat":
            return len(node.inputs) == 1
    return False


def _is_inference_dropout(node: ir.Node, opset: int) -> bool:
    if any(mask.uses() or mask.is_graph_output() for mask in node.outputs[1:]):
        return False
    if opset >= _DROPOUT_SWITCH_IN:
        switch = graph.input_at(node, 2)
        flag = graph.constant_array(switch)
        return switch is None or (flag is not None and not np.any(flag))
    return opset >= _DROPOUT_SWITCH_OUT or graph.attribute_int(node, "is_test", 0) != 0


def _bypass(editor: Editor, node: ir.Node) -> int:
    source, output = node.inputs[0], node.outputs[0]
    assert source is not None, "checked by _is_no_op"
    if not output.is_graph_output():
        if source.type is None:
            source.type = output.type
        output.replace_all_uses_with(source)
    elif source.producer() is None or source.is_graph_output() or source.graph is not editor.graph:
        return 0
    else:
        editor.take_over(output, source)
    editor.drop(node)
    return 1


def unshare_biases(model: ir.Model) -> int:
    """Copies a bias that several nodes read, one copy for each layer. Exact.

    The scale of a bias is that of its layer's input times that of its weight: two layers that share the
    numbers still need two scales.
    """
    return rewrite(model, partial(_unshare, index=2), "Conv", "ConvTranspose", "Gemm")


def unshare_weights(model: ir.Model) -> int:
    """Copies a weight that several nodes read, one copy for each layer. Exact.

    The NPU's shift limits tie a weight's scale to its layer's input and output: two layers cannot always
    agree on one.
    """
    return rewrite(model, partial(_unshare, index=1), "Conv", "ConvTranspose", "Gemm")


def _unshare(editor: Editor, node: ir.Node, index: int) -> bool:
    value = graph.input_at(node, index)
    array = graph.constant_array(value)
    if value is None or array is None or not (len(value.uses()) > 1 or value.is_graph_output()):
        return False
    node.replace_input_with(index, editor.initializer(value.name or "constant", array))
    return True


# The file must not grow much: a result is kept if it is small, or holds no more elements than the
# constants that disappear with it.
_SMALL_BYTES = 1 << 20
_TOTAL_SMALL_BYTES = 1 << 26

# Folding one layer of shape arithmetic lets inference see the next. Real exports need two or three rounds.
_MAX_ROUNDS = 8

_RANDOM = (
    "Bernoulli",
    "Multinomial",
    "RandomNormal",
    "RandomUniform",
    "RandomNormalLike",
    "RandomUniformLike",
)
_LINEAR = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear")
_NEVER = frozenset((*_RANDOM, *_LINEAR, "Constant", "Dropout"))

# What a model that is run for its constants only may raise.
_REFUSALS = (ModelError, ort.Fail, ort.InvalidArgument, ort.NotImplemented, ort.RuntimeException)

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
        if not folded:
            break
        total += folded
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
        return (
            bool(inputs)
            and not graph.has_subgraph(node)
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
            shape = graph.static_shape(value)
            if not value.name:
                continue
            if shape is None or value.dtype is None:
                return False
            elements += math.prod(shape)
            size += math.ceil(math.prod(shape) * value.dtype.itemsize)
        freed = {v for v in node.inputs if v is not None and len(v.consumers()) == 1}
        if elements <= sum(math.prod(graph.static_shape(value) or (0,)) for value in freed):
            return True
        self.small_bytes += size
        return size <= _SMALL_BYTES and self.small_bytes <= _TOTAL_SMALL_BYTES


def _known_shape(node: ir.Node) -> NDArray[np.int64] | None:
    """The value of Shape or Size, or of a Gather or Slice that reads only known entries of a Shape."""
    if node.op_type in ("Shape", "Size"):
        shape = graph.static_shape(graph.input_at(node, 0))
        if shape is None:
            return None
        return np.array(math.prod(shape) if node.op_type == "Size" else _cut(node, shape), dtype=np.int64)
    source = graph.producer(graph.input_at(node, 0), "Shape")
    picked = None if source is None else _picked(node, source)
    if picked is None or any(not isinstance(d, int) or d < 0 for d in picked.reshape(-1)):
        return None
    return picked.astype(np.int64)


def _cut(node: ir.Node, shape: tuple[object, ...]) -> tuple[object, ...]:
    end = node.attributes.get("end")
    return shape[graph.attribute_int(node, "start", 0) : None if end is None else end.as_int()]


def _picked(node: ir.Node, source: ir.Node) -> NDArray[Any] | None:
    value = source.inputs[0]
    if value is None or value.shape is None:
        return None
    entries = np.array([*_cut(source, tuple(value.shape)), None], dtype=object)[:-1]
    if node.op_type == "Gather":
        indices = graph.constant_array(graph.input_at(node, 1))
        if indices is None or np.any(indices >= len(entries)) or np.any(indices < -len(entries)):
            return None
        return np.asarray(entries[indices], dtype=object)
    if node.op_type == "Slice" and len(node.inputs) >= 3:
        starts, ends = graph.integers(node.inputs[1]), graph.integers(node.inputs[2])
        steps = graph.integers(graph.input_at(node, 4)) if graph.input_at(node, 4) is not None else (1,)
        if starts and ends and steps and steps[0] > 0:
            return entries[starts[0] : ends[0] : steps[0]]
    return None


def _fold(editor: Editor, found: _Selection) -> int:
    for value, array in found.known.items():
        node = value.producer()
        assert node is not None, "only computed values are in here"
        _to_initializer(editor, value, ir.tensor(array))
        editor.drop(node)
    nodes, count = list(found.nodes), len(found.known)
    if not nodes or _replace(editor, nodes):
        return count + len(nodes)
    # One operator that ONNX Runtime lacks must not keep the others from being folded.
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
    try:
        session = open_session(proto.SerializeToString(), threads=1, optimise=False)
        arrays = session.run([value.name for value in wanted], feeds)
    except _REFUSALS:
        return None
    return dict(zip(wanted, arrays, strict=True))
