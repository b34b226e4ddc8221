"""Biases in other types: 8 bits with a scale of their own, 32 bits in the products' step, 16 bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.model.graph import attribute_float, attribute_int, constant_array, opset_version
from roundel.qdq.nodes import MICROSOFT
from roundel.quark.tools.files import Rewritten
from roundel.quark.tools.wiring import (
    LAYERS,
    is_dequantize,
    numbers,
    set_type,
    stored_values,
    swap_constant,
    tidy,
)

_NATIVE_16_BIT_OPSET = 21


@dataclass(frozen=True, slots=True, eq=False)
class LayerBias:
    """A layer's bias and the step of the products that it is added to."""

    layer: ir.Node
    reader: ir.Node  # the DQ node
    values: NDArray[np.float32]
    codes: NDArray[Any]
    step: NDArray[np.float64]


def layer_biases(graph: ir.Graph) -> Iterator[LayerBias]:
    """Every constant bias behind a DQ, of layers whose input and weight are quantized, too."""
    for node in list(graph):
        if node.op_type not in LAYERS or len(node.inputs) < 3:
            continue
        makers = [value.producer() if value is not None else None for value in node.inputs[:3]]
        if not all(is_dequantize(maker) for maker in makers):
            continue
        moving, weight, bias = (maker for maker in makers if maker is not None)
        values, codes = stored_values(bias), constant_array(bias.inputs[0])
        step = _step(node, moving, weight)
        if values is not None and codes is not None and step is not None:
            yield LayerBias(node, bias, values, codes, step)


def _step(node: ir.Node, moving: ir.Node, weight: ir.Node) -> NDArray[np.float64] | None:
    one, other = numbers(moving), numbers(weight)
    if one is None or other is None or one[0].size != 1:
        return None
    step = one[0].astype(np.float64).reshape(()) * other[0].astype(np.float64).reshape(-1)
    if node.op_type == "Gemm":
        step = step * attribute_float(node, "alpha", 1.0) / (attribute_float(node, "beta", 1.0) or 1.0)
    if node.op_type == "ConvTranspose" and step.size > 1:
        step = np.tile(step, attribute_int(node, "group", 1))
    return step.reshape(()) if step.size == 1 else step


def rederive_biases(model: ir.Model) -> int:
    """Bring 32-bit biases to the step of their layer's products again, in place."""
    count = 0
    for found in layer_biases(model.graph):
        given = numbers(found.reader)
        if found.codes.dtype != np.int32 or given is None:
            continue
        if not np.allclose(given[0].astype(np.float64), found.step, rtol=1e-6):
            _store(model, found, np.int32)
            count += 1
    tidy(model)
    return count


def convert_a8w8_npu_to_a8w8_cpu(model: ir.Model) -> Rewritten:
    """Biases of 8 bits become 32-bit ones in the step of their layer's products, as CPUs compute them."""
    result = model.clone()
    count = 0
    for found in layer_biases(result.graph):
        if found.codes.dtype == np.int8:
            _store(result, found, np.int32)
            count += 1
    return tidy(result), f"changed {count} biases from int8 to int32"


def convert_bias_int32_to_int16(model: ir.Model) -> Rewritten:
    """Biases of 32 bits become 16-bit ones with the same step where their codes fit; the others stay."""
    result = model.clone()
    count = kept = 0
    limits = np.iinfo(np.int16)
    for node in list(result.graph):
        codes = constant_array(node.inputs[0]) if is_dequantize(node) else None
        if codes is None or codes.dtype != np.int32:
            continue
        if codes.min(initial=0) < limits.min or codes.max(initial=0) > limits.max:
            kept += 1
            continue
        given = numbers(node)
        assert given is not None
        _replace(result, node, codes.astype(np.int16), given[0])
        if opset_version(result) < _NATIVE_16_BIT_OPSET:
            node.domain = MICROSOFT
            result.graph.opset_imports.setdefault(MICROSOFT, 1)
        count += 1
    left = f"; {kept} do not fit and stay in 32" if kept else ""
    return tidy(result), f"changed {count} biases from int32 to int16{left}"


def _store(model: ir.Model, found: LayerBias, dtype: Any) -> None:
    limits = np.iinfo(dtype)
    codes = np.clip(np.rint(found.values.astype(np.float64) / found.step), limits.min, limits.max)
    _replace(model, found.reader, codes.astype(dtype), np.asarray(found.step, np.float32))


def _replace(model: ir.Model, node: ir.Node, codes: NDArray[Any], scale: NDArray[np.float32]) -> None:
    """New codes, scale and zero point for a DQ node."""
    parts = (codes, np.asarray(scale, np.float32), np.zeros(scale.shape, codes.dtype))
    for index, part in enumerate(parts):
        swap_constant(model.graph, [(node, index)], part)
    if scale.ndim:
        node.attributes["axis"] = ir.AttrInt64("axis", 0)
    set_type(node.outputs[0], ir.DataType.FLOAT)
