"""Float32 models as float16 models: half the size, and float16 between the nodes, too."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from roundel.errors import ModelError
from roundel.model.graph import constant_array
from roundel.passes import refresh_shapes
from roundel.qdq.nodes import Names
from roundel.quark.tools.files import Rewritten
from roundel.quark.tools.wiring import tidy

_FULL, _HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16
# Inputs that are float32 by the operator's definition, from this index on.
_ALWAYS_FULL = {"Resize": 1, "Upsample": 1}
_LARGEST = float(np.finfo(np.float16).max)


def convert_fp32_to_fp16(model: ir.Model, keep_io_types: bool = False) -> Rewritten:
    """Every float32 tensor becomes float16; graph inputs and outputs stay float32 when asked for.

    Raises:
        ModelError: the model holds quantized tensors, or bodies of If, Loop or Scan.
    """
    result = model.clone()
    _refuse(result)
    refresh_shapes(result)
    if keep_io_types:
        _cast_borders(result.graph)
    kept = set(result.graph.inputs) | set(result.graph.outputs) if keep_io_types else set()
    constants = list(_narrow_constants(result.graph))
    for value in (*result.graph.inputs, *(v for node in result.graph for v in node.outputs)):
        if value.dtype is _FULL and value not in kept:
            value.type = ir.TensorType(_HALF)
    for node in result.graph:
        _narrow_attributes(node)
    return tidy(result), f"{len(constants)} constants and all tensors between nodes in float16"


def _refuse(model: ir.Model) -> None:
    for node in model.graph.all_nodes():
        if node.graph is not model.graph:
            raise ModelError("Bodies of If, Loop and Scan cannot be narrowed.", where=f"node '{node.name}'")
        if "QuantizeLinear" in node.op_type or "DequantizeLinear" in node.op_type:
            raise ModelError(
                "The model is quantized.",
                where=f"node '{node.name}'",
                expected="a float32 model",
                hint="Take the pairs out first: roundel tools remove_qdq.",
            )


def _cast_borders(graph: ir.Graph) -> None:
    """A Cast behind each float32 input and before each float32 output."""
    names = Names(graph)
    for value in [v for v in graph.inputs if v.dtype is _FULL]:
        uses = list(value.uses())
        cast = _cast(value, names(f"{value.name}_half"), _HALF)
        for use in uses:
            use.node.replace_input_with(use.idx, cast.outputs[0])
        graph.insert_before(graph[0], cast)
    for index, value in enumerate(list(graph.outputs)):
        if value.dtype is not _FULL or value.producer() is None:
            continue
        name = str(value.name)
        value.name = names(f"{name}_half")
        cast = _cast(value, name, _FULL)
        graph.append(cast)
        graph.outputs[index] = cast.outputs[0]


def _cast(value: ir.Value, name: str, dtype: ir.DataType) -> ir.Node:
    out = ir.Value(name=name, shape=value.shape, type=ir.TensorType(dtype))
    attribute = ir.AttrInt64("to", dtype.value)
    return ir.Node("", "Cast", [value], attributes=[attribute], outputs=[out], name=f"{name}_cast")


def _narrow_constants(graph: ir.Graph) -> Iterator[ir.Value]:
    for value in list(graph.initializers.values()):
        array = constant_array(value)
        if array is None or array.dtype != np.float32 or _needs_full(value):
            continue
        value.const_value = ir.tensor(np.clip(array, -_LARGEST, _LARGEST).astype(np.float16), name=value.name)
        value.type = ir.TensorType(_HALF)
        yield value


def _needs_full(value: ir.Value) -> bool:
    return any(use.idx >= _ALWAYS_FULL.get(use.node.op_type, 1000) for use in value.uses())


def _narrow_attributes(node: ir.Node) -> None:
    leaves = node.op_type == "Cast" and node.outputs[0].dtype is _FULL
    for name, attribute in list(node.attributes.items()):
        if attribute.type is ir.AttributeType.TENSOR and attribute.as_tensor().dtype is _FULL:
            array = attribute.as_tensor().numpy().astype(np.float16)
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(array))
        elif name in ("to", "dtype") and attribute.value == _FULL.value and not leaves:
            node.attributes[name] = ir.AttrInt64(name, _HALF.value)
