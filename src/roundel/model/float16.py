"""Half-precision models become float32 models: the same values, held exactly."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

_HALF = ir.DataType.FLOAT16
_FULL = ir.DataType.FLOAT


def widen_float16(model: ir.Model) -> list[str]:
    """Turn every float16 tensor, attribute and graph input or output into float32, in place."""
    changed = sum(_widen_graph(graph) for graph in _graphs(model))
    return [f"widened {changed} float16 tensors to float32"] if changed else []


def _graphs(model: ir.Model) -> list[ir.Graph]:
    return [model.graph, *(g for g in model.graph.subgraphs() if isinstance(g, ir.Graph))]


def _widen_graph(graph: ir.Graph) -> int:
    changed = 0
    for value in graph.initializers.values():
        if value.const_value is not None and value.const_value.dtype is _HALF:
            array = value.const_value.numpy().astype(np.float32)
            value.const_value = ir.tensor(array, name=value.name)
            value.dtype = _FULL
            changed += 1
    for value in (*graph.inputs, *graph.outputs):
        changed += _widen_value(value)
    for node in graph:
        for value in node.outputs:
            changed += _widen_value(value)
        changed += _widen_attributes(node)
    return changed


def _widen_value(value: ir.Value) -> int:
    if value.dtype is not _HALF:
        return 0
    value.dtype = _FULL
    return 1


def _widen_attributes(node: ir.Node) -> int:
    changed = 0
    for name, attr in list(node.attributes.items()):
        if attr.type is ir.AttributeType.TENSOR and attr.as_tensor().dtype is _HALF:
            array = attr.as_tensor().numpy().astype(np.float32)
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(array))
            changed += 1
        elif name in ("to", "dtype", "output_dtype") and attr.value == _HALF.value:
            node.attributes[name] = ir.AttrInt64(name, _FULL.value)
            changed += 1
    return changed
