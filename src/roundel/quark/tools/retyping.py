"""Other element types for activations: the same codes shifted, or coarser ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.model.graph import attribute_float, attribute_int, constant_array, is_constant, opset_version
from roundel.qdq.nodes import MICROSOFT
from roundel.quark.tools.tool import Rewritten
from roundel.quark.tools.wiring import (
    LAYERS,
    is_dequantize,
    is_quantize,
    numbers,
    pairs,
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


Numbers = tuple[NDArray[Any], NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Retype:
    """From one element type to another, and what becomes of scale and zero point."""

    source: ir.DataType
    target: ir.DataType
    change: Callable[[Numbers], Numbers]


def _shifted(offset: int, dtype: Any) -> Callable[[Numbers], Numbers]:
    """The same scale; codes and zero point move together, so that nothing changes."""

    def change(given: Numbers) -> Numbers:
        scale, zero = given
        return scale, np.asarray(zero.astype(np.int64) + offset, dtype)

    return change


def _coarser(given: Numbers) -> Numbers:
    """The same range in 256 steps instead of 65,536."""
    scale, zero = given
    ratio = 65535 / 255
    steps = np.clip(np.rint(zero.astype(np.float64) / ratio), 0, 255)
    return np.asarray(scale * ratio, np.float32), np.asarray(steps, np.uint8)


S8_TO_U8 = Retype(ir.DataType.INT8, ir.DataType.UINT8, _shifted(128, np.uint8))
U16_TO_S16 = Retype(ir.DataType.UINT16, ir.DataType.INT16, _shifted(-32768, np.int16))
U16_TO_U8 = Retype(ir.DataType.UINT16, ir.DataType.UINT8, _coarser)


def convert_s8s8_to_u8s8(model: ir.Model) -> Rewritten:
    """Activations in uint8 instead of int8; exact."""
    return _retyped(model, S8_TO_U8)


def convert_u16s8_to_s16s8(model: ir.Model) -> Rewritten:
    """Activations in int16 instead of uint16; exact."""
    return _retyped(model, U16_TO_S16)


def convert_u16u8_to_u8u8(model: ir.Model) -> Rewritten:
    """Activations in uint8 instead of uint16: 256 times coarser; 32-bit biases follow the new scales."""
    result, done = _retyped(model, U16_TO_U8)
    biases = rederive_biases(result)
    return result, f"{done}, recomputed {biases} biases"


def _retyped(model: ir.Model, retype: Retype) -> Rewritten:
    result = model.clone()
    groups: dict[tuple[str, str], list[ir.Node]] = {}  # pairs that share scale and zero point go on doing so
    count = 0
    for quantizer, readers in _of_type(result.graph, retype.source):
        key = (_name(quantizer, 1), _name(quantizer, 2))
        groups.setdefault(key, []).extend((quantizer, *readers))
        set_type(quantizer.outputs[0], retype.target)
        count += 1
    for nodes in groups.values():
        given = numbers(nodes[0])
        assert given is not None
        for index, part in enumerate(retype.change(given), start=1):
            swap_constant(result.graph, [(node, index) for node in nodes], part)
    kinds = f"{retype.source.name.lower()} to {retype.target.name.lower()}"
    return tidy(result), f"changed {count} activations from {kinds}"


def _name(node: ir.Node, index: int) -> str:
    value = node.inputs[index] if index < len(node.inputs) else None
    return str(value.name) if value is not None else str(node.name)


def _of_type(graph: ir.Graph, dtype: ir.DataType) -> Iterator[tuple[ir.Node, list[ir.Node]]]:
    for quantizer, readers in list(pairs(graph)):
        given = numbers(quantizer)
        moving = quantizer.inputs[0] is not None and not is_constant(quantizer.inputs[0])
        if moving and given is not None and ir.DataType.from_numpy(given[1].dtype) is dtype:
            yield quantizer, readers


def convert_resize_fs_to_pof2s(model: ir.Model) -> Rewritten:
    """The pairs before and behind each Resize get the next power of two above their scale: nothing clips."""
    result = model.clone()
    count = 0
    for node in [n for n in result.graph if n.op_type == "Resize"]:
        before = node.inputs[0].producer() if node.inputs[0] is not None else None
        behind = [use.node for use in node.outputs[0].uses()]
        found = [_quantizer(before), *(reader for reader in behind if is_quantize(reader))]
        for quantizer in found:
            count += quantizer is not None and _round_scale(result.graph, quantizer)
    return tidy(result), f"rounded the scales of {count} pairs"


def _quantizer(node: ir.Node | None) -> ir.Node | None:
    if node is None or not is_dequantize(node) or node.inputs[0] is None:
        return None
    maker = node.inputs[0].producer()
    return maker if is_quantize(maker) else None


def _round_scale(graph: ir.Graph, quantizer: ir.Node) -> bool:
    given = numbers(quantizer)
    if given is None or given[0].size != 1:
        return False
    exact = float(given[0].reshape(()))
    rounded = np.float32(math.ldexp(1.0, math.ceil(math.log2(exact))))
    if rounded == exact:
        return False
    nodes = (quantizer, *(use.node for use in quantizer.outputs[0].uses()))
    swap_constant(graph, [(node, 1) for node in nodes], np.asarray(rounded))
    return True
