"""Other types for what a model stores: activations, biases, and the scales around Resize."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import onnx_ir as ir

from roundel.model.edit import Names
from roundel.model.graph import constant_array, is_constant, opset_version
from roundel.qdq import read
from roundel.qdq.nodes import MICROSOFT
from roundel.quark.tools.tool import LAYERS, dequantizer, on_copy
from roundel.targets.npu import NATIVE_16_BIT_OPSET
from roundel.types import Array, Doubles, QType

Change = Callable[[Array, Array], tuple[Array, Array]]
"""What becomes of scale and zero point."""


@on_copy
def convert_s8s8_to_u8s8(model: ir.Model) -> str:
    """Activations in uint8 instead of int8; exact."""
    return _retype(model, QType.INT8, QType.UINT8, lambda scale, zero: (scale, zero + 128))


@on_copy
def convert_u16s8_to_s16s8(model: ir.Model) -> str:
    """Activations in int16 instead of uint16; exact."""
    return _retype(model, QType.UINT16, QType.INT16, lambda scale, zero: (scale, zero - 32768))


@on_copy
def convert_u16u8_to_u8u8(model: ir.Model) -> str:
    """Activations in uint8 instead of uint16: 256 times coarser; 32-bit biases follow the new scales."""
    ratio = 65535 // 255
    done = _retype(
        model, QType.UINT16, QType.UINT8, lambda scale, zero: (scale * ratio, np.rint(zero / ratio))
    )
    count = 0
    for node, said, step in _biases(model.graph, QType.INT32):
        if not np.allclose(said.scale, step, rtol=1e-6):
            _restore_bias(model, node, step)
            count += 1
    return f"{done}, recomputed {count} biases"


def _retype(model: ir.Model, source: QType, target: QType, change: Change) -> str:
    """Pairs that share scale and zero point go on doing so."""
    groups: dict[tuple[ir.Value | None, ...], list[ir.Node]] = defaultdict(list)
    count = 0
    for quantizer, readers in read.pairs(model.graph):
        said = read.read_quantizer(quantizer)
        if said is not None and said.dtype == source.value and not is_constant(quantizer.inputs[0]):
            groups[tuple(quantizer.inputs[1:3])] += (quantizer, *readers)
            quantizer.outputs[0].type = ir.TensorType(ir.DataType.from_numpy(target.dtype))
            count += 1
    for nodes in groups.values():
        said = read.read_quantizer(nodes[0])
        assert said is not None
        scale, zero = change(said.scale, said.zero_point.astype(np.int64))
        _swap(model.graph, nodes, 1, np.asarray(scale, np.float32))
        _swap(model.graph, nodes, 2, np.asarray(zero, target.dtype))
    return f"changed {count} activations from {source.value} to {target.value}"


def _swap(graph: ir.Graph, nodes: Sequence[ir.Node], index: int, array: Array) -> None:
    """New content for the constant that is read here; it keeps its name where nobody else reads it."""
    old = nodes[0].inputs[index] if index < len(nodes[0].inputs) else None
    tensor = ir.tensor(array)
    new = ir.Value(shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    for node in nodes:
        node.resize_inputs(max(index + 1, len(node.inputs)))
        node.replace_input_with(index, new)
    name = str(old.name) if old is not None else f"{nodes[0].name}_zero_point"
    if old is None or old.uses() or old.is_graph_output() or not is_constant(old):
        name = Names(graph)(name)
    else:
        del graph.initializers[name]
    new.name = name
    graph.register_initializer(new)


@on_copy
def convert_a8w8_npu_to_a8w8_cpu(model: ir.Model) -> str:
    """Biases of 8 bits become 32-bit ones in the step of their layer's products, as CPUs compute them."""
    count = 0
    for node, _, step in _biases(model.graph, QType.INT8):
        _restore_bias(model, node, step)
        count += 1
    return f"changed {count} biases from int8 to int32"


@on_copy
def convert_bias_int32_to_int16(model: ir.Model) -> str:
    """Biases of 32 bits become 16-bit ones with the same step where their codes fit; the others stay."""
    count = kept = 0
    limits = np.iinfo(np.int16)
    for node in list(model.graph):
        codes = constant_array(node.inputs[0]) if read.is_dequantize(node) else None
        said = None if codes is None or codes.dtype != np.int32 else read.read_quantizer(node)
        if codes is None or said is None:
            continue
        if codes.min(initial=0) < limits.min or codes.max(initial=0) > limits.max:
            kept += 1
            continue
        _replace_bias(model, node, codes.astype(np.int16), said.scale)
        if opset_version(model) < NATIVE_16_BIT_OPSET:
            node.domain = MICROSOFT
            model.graph.opset_imports.setdefault(MICROSOFT, 1)
        count += 1
    left = f"; {kept} do not fit and stay in 32" if kept else ""
    return f"changed {count} biases from int32 to int16{left}"


def _biases(graph: ir.Graph, kind: QType) -> Iterator[tuple[ir.Node, read.Quantizer, Doubles]]:
    """The DQ node of each constant bias in a type, what it says, and the step of the products it is added to.

    Input and weight of the layer are quantized, too.
    """
    for layer in list(graph):
        if layer.op_type not in LAYERS or len(layer.inputs) < 3:
            continue
        makers = list(map(dequantizer, layer.inputs[:3]))
        data, weight, bias = (None if maker is None else read.read_quantizer(maker) for maker in makers)
        if data is None or weight is None or bias is None or data.scale.size != 1:
            continue
        if makers[2] is not None and is_constant(makers[2].inputs[0]) and bias.dtype == kind.value:
            yield makers[2], bias, read.product_step(layer, data, weight)


def _restore_bias(model: ir.Model, node: ir.Node, step: Doubles) -> None:
    """The same bias in 32 bits and in another step."""
    values, limits = read.stored_values(node), np.iinfo(np.int32)
    assert values is not None
    codes = np.clip(np.rint(values.astype(np.float64) / step), limits.min, limits.max)
    _replace_bias(model, node, codes.astype(np.int32), step)


def _replace_bias(model: ir.Model, node: ir.Node, codes: Array, scale: Doubles) -> None:
    """New codes, scale and zero point for a DQ node."""
    parts = (codes, np.asarray(scale, np.float32), np.zeros(scale.shape, codes.dtype))
    for index, part in enumerate(parts):
        _swap(model.graph, [node], index, part)
    if scale.ndim:
        node.attributes["axis"] = ir.AttrInt64("axis", 0)


@on_copy
def convert_resize_fs_to_pof2s(model: ir.Model) -> str:
    """The pairs before and behind each Resize get the next power of two above their scale: nothing clips."""
    count = 0
    for node in [n for n in model.graph if n.op_type == "Resize"]:
        maker = dequantizer(node.inputs[0])
        codes = maker.inputs[0] if maker is not None else None
        around = [codes.producer() if codes is not None else None, *(u.node for u in node.outputs[0].uses())]
        count += sum(_round_scale(model.graph, quantizer) for quantizer in around)
    return f"rounded the scales of {count} pairs"


def _round_scale(graph: ir.Graph, quantizer: ir.Node | None) -> bool:
    said = read.read_quantizer(quantizer) if read.is_quantize(quantizer) else None
    if quantizer is None or said is None or said.scale.size != 1 or said.power_of_two:
        return False
    rounded = math.ldexp(1.0, math.ceil(math.log2(float(said.scale.reshape(())))))
    nodes = [quantizer, *(use.node for use in quantizer.outputs[0].uses())]
    _swap(graph, nodes, 1, np.asarray(rounded, np.float32))
    return True
