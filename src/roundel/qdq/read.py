"""Q/DQ read back from a file, whoever wrote it: native, ONNX Runtime's, AMD's operators, casts and blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeGuard

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.model.graph import (
    attribute_float,
    attribute_int,
    constant_array,
    constant_scalar,
    op_key,
    values_by_name,
)
from roundel.qdq.nodes import CODES, QUARK
from roundel.targets.operators import Trait, ops_with
from roundel.types import QParams, QType

QUANTIZE = frozenset({"QuantizeLinear", "com.microsoft::QuantizeLinear", f"{QUARK}::ExtendedQuantizeLinear"})
DEQUANTIZE = frozenset(
    {"DequantizeLinear", "com.microsoft::DequantizeLinear", f"{QUARK}::ExtendedDequantizeLinear"}
)
PAIRS = QUANTIZE | DEQUANTIZE
BLOCK_FORMATS = {f"{QUARK}::BFPQuantizeDequantize": "bfp", f"{QUARK}::MXQuantizeDequantize": "mx"}
# Quantized operators that are neither Q nor DQ: the NPU's compilers take Q/DQ models only.
OTHER_FORMS = frozenset(
    {
        "DynamicQuantizeLinear",
        "ConvInteger",
        "MatMulInteger",
        "QLinearConv",
        "QLinearMatMul",
        "com.microsoft::MatMulNBits",
        "com.microsoft::DynamicQuantizeMatMul",
        "com.microsoft::MatMulIntegerToFloat",
        "com.microsoft::QGemm",
        "com.microsoft::QLinearAdd",
        "com.microsoft::QLinearMul",
        "com.microsoft::QLinearConcat",
        *BLOCK_FORMATS,
    }
)
BFLOAT16 = "bfloat16"
CENTRES = {"int8": 0, "uint8": 128, "int16": 0, "uint16": 32768, "int32": 0}
BITS = {"int8": 8, "uint8": 8, "int16": 16, "uint16": 16, "int32": 32}


def is_quantize(node: ir.Node | None) -> TypeGuard[ir.Node]:
    """Whether the node makes codes."""
    return node is not None and op_key(node) in QUANTIZE


def is_dequantize(node: ir.Node | None) -> TypeGuard[ir.Node]:
    """Whether the node reads codes."""
    return node is not None and op_key(node) in DEQUANTIZE


# Behind these, quantizers for the NPU put a Mul by nearly 1 that imitates the hardware's arithmetic.
_GAINED = ops_with(Trait.GAIN)
_GAINS = (0.9, 1.1)


def is_gain(node: ir.Node) -> bool:
    """Whether the node is such a Mul by nearly 1."""
    source = node.inputs[0] if node.op_type == "Mul" and len(node.inputs) == 2 else None
    maker = None if source is None else source.producer()
    if maker is None or maker.op_type not in _GAINED:
        return False
    factor = constant_scalar(node.inputs[1])
    return factor is not None and _GAINS[0] < factor < _GAINS[1]


def casts_to(node: ir.Node, kind: ir.DataType) -> bool:
    """Whether the node is a Cast to the type."""
    return op_key(node) == "Cast" and attribute_int(node, "to", 0) == kind.value


def stores(node: ir.Node) -> bool:
    """Whether the node only writes or reads codes."""
    casts = casts_to(node, ir.DataType.BFLOAT16) or casts_to(node, ir.DataType.FLOAT)
    return casts or op_key(node) in PAIRS or op_key(node) in BLOCK_FORMATS


def restored(node: ir.Node) -> ir.Value | None:
    """The float tensor that the node gives back, after the one before it stored it; None for other nodes."""
    if op_key(node) in BLOCK_FORMATS:
        return node.inputs[0]
    before = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    if before is None:
        return None
    cast = casts_to(node, ir.DataType.FLOAT) and casts_to(before, ir.DataType.BFLOAT16)
    return before.inputs[0] if cast or (is_dequantize(node) and is_quantize(before)) else None


def source_of(value: ir.Value) -> ir.Value:
    """The tensor itself, for one that was stored and restored by Q/DQ pairs or their like."""
    while True:
        maker = value.producer()
        source = None if maker is None else restored(maker)
        if source is None:
            return value
        value = source


def pairs(graph: ir.Graph) -> Iterator[tuple[ir.Node, list[ir.Node]]]:
    """Every quantizer with its dequantizers, where nothing else reads its codes."""
    for node in list(graph):
        if not is_quantize(node) or node.outputs[0].is_graph_output():
            continue
        readers = [use.node for use in node.outputs[0].uses()]
        if readers and all(is_dequantize(reader) for reader in readers):
            yield node, readers


@dataclass(frozen=True, eq=False)
class Quantizer:
    """What one Q or DQ node says about its tensor.

    Attributes:
        dtype: element type of the codes.
        scale: one number, one for each channel, or one for each block.
        zero_point: likewise, in the type of the codes.
        axis: of the channels or blocks, None per tensor.
        domain: of the node.
        block: numbers that share a scale along the axis; 0 for all of a channel's.
    """

    dtype: str
    scale: NDArray[np.float64]
    zero_point: NDArray[Any]
    axis: int | None = None
    domain: str = ""
    block: int = 0

    @cached_property
    def power_of_two(self) -> bool:
        """Whether every scale is a power of two."""
        mantissa, _ = np.frexp(self.scale)
        return bool((mantissa == 0.5).all())

    @property
    def symmetric(self) -> bool:
        """Whether every zero point is the centre of the type."""
        return self.dtype not in CENTRES or bool((self.zero_point == CENTRES[self.dtype]).all())

    @property
    def params(self) -> QParams | None:
        """As the numerics know them; None for types that they do not."""
        if self.dtype not in BITS:
            return None
        return QParams(self.scale.astype(np.float32), self.zero_point, QType(self.dtype), self.axis)

    def real(self, codes: NDArray[Any]) -> NDArray[np.float32]:
        """What codes stand for, as ONNX Runtime computes it."""
        scale, zero = (self._along(part, codes.shape) for part in (self.scale, self.zero_point))
        wide = np.float32 if codes.dtype.itemsize < 4 else np.float64
        difference = (codes.astype(wide) - zero.astype(wide)).astype(np.float32)
        return np.asarray(difference * scale.astype(np.float32), np.float32)

    def _along(self, part: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """Scales or zero points in a shape that goes with the codes."""
        if part.size == 1 or self.axis is None:  # several without an axis are illegal: rule Q14 says so
            return part.reshape(-1)[:1].reshape(())
        axis = self.axis % len(shape)
        if self.block:
            return np.repeat(part, self.block, axis).take(range(shape[axis]), axis)
        return part.reshape([-1 if place == axis else 1 for place in range(len(shape))])


def read_quantizer(node: ir.Node) -> Quantizer | None:
    """What a Q or DQ node says; None where its scale or zero point is computed at run time."""
    scale = constant_of(node.inputs[1])
    zero_value = node.inputs[2] if len(node.inputs) > 2 else None
    zero, dtype = constant_of(zero_value), stored_type(node)
    if scale is None or (zero is None and zero_value is not None):
        return None
    if zero is None:
        zero = np.zeros(scale.shape, ir.DataType[dtype.upper()].numpy())
    axis = attribute_int(node, "axis", 1) if scale.size > 1 else None
    block = attribute_int(node, "block_size", 0)
    return Quantizer(dtype, scale.astype(np.float64), zero, axis, node.domain, block)


def stored_type(node: ir.Node) -> str:
    """The type that a Q writes or a DQ reads, in lower case."""
    zero_point = node.inputs[2] if len(node.inputs) > 2 else None
    codes = node.inputs[0] if is_dequantize(node) else node.outputs[0]
    for value in (zero_point, codes):
        tensor = None if value is None else ir.convenience.get_const_tensor(value)
        if tensor is not None:
            return tensor.dtype.name.lower()
        if value is not None and value.dtype is not None:
            return value.dtype.name.lower()
    wanted = attribute_int(node, "output_dtype", 0)
    return ir.DataType(wanted).name.lower() if wanted else "uint8"  # ONNX's default


def constant_of(value: ir.Value | None) -> NDArray[Any] | None:
    """The content of an initializer or of a Constant node, or None."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else np.asarray(tensor.numpy())


def stored_values(node: ir.Node | None) -> NDArray[np.float32] | None:
    """What a DQ node makes of constant codes; None for other nodes, and where they are computed."""
    codes = constant_array(node.inputs[0]) if node is not None and is_dequantize(node) else None
    found = None if node is None or codes is None else read_quantizer(node)
    return None if found is None or codes is None else found.real(codes)


@dataclass(frozen=True, eq=False)
class StoredTensor(Quantizer):
    """How one tensor is stored.

    Attributes:
        name: of the float tensor in the stripped graph.
        codes: the content of a constant.
    """

    name: str = ""
    codes: NDArray[Any] | None = None

    @property
    def constant(self) -> bool:
        """Whether it is a weight or a bias."""
        return self.codes is not None

    @property
    def position(self) -> int | None:
        """p for the one scale 2**-p; None for any other."""
        if self.scale.size != 1 or not self.power_of_two:
            return None
        return int(-np.log2(self.scale.reshape(-1)[0]))


def product_step(layer: ir.Node, data: Quantizer, weight: Quantizer) -> NDArray[np.float64]:
    """The step of a layer's products, which its bias is added to: one number, or one for each channel."""
    step = data.scale.reshape(()) * weight.scale.reshape(-1)
    if layer.op_type == "Gemm":
        step = step * attribute_float(layer, "alpha", 1.0) / (attribute_float(layer, "beta", 1.0) or 1.0)
    if layer.op_type == "ConvTranspose" and step.size > 1:
        step = np.tile(step, attribute_int(layer, "group", 1))
    return step.reshape(()) if step.size == 1 else step


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """All of them, and the Q/DQ nodes that could not be read.

    Attributes:
        tensors: by name of the float tensor.
        unreadable: Q/DQ nodes whose scale is computed at run time.
        mismatched: tensors whose Q and DQ disagree.
    """

    tensors: Mapping[str, StoredTensor]
    unreadable: tuple[str, ...]
    mismatched: tuple[str, ...]


def strip_stored(model: ir.Model) -> StoredTensors:
    """Take every pair and every block-format node out of the graph, in place, and say what they held."""
    blocks: dict[str, StoredTensor] = {}
    for node in list(model.graph):
        source = node.inputs[0] if op_key(node) in BLOCK_FORMATS else None
        if source is None:
            continue
        kind, name = BLOCK_FORMATS[op_key(node)], str(source.name)
        blocks.setdefault(name, StoredTensor(kind, np.ones(()), np.zeros(()), domain=QUARK, name=name))
        node.outputs[0].replace_all_uses_with(source, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
    found = strip_pairs(model)
    return StoredTensors({**blocks, **found.tensors}, found.unreadable, found.mismatched)


def strip_pairs(model: ir.Model) -> StoredTensors:
    """Take the Q/DQ and bfloat16 Cast pairs out of the graph, in place, and say what they held."""
    work = _Stripper(model.graph)
    for node in list(model.graph):
        work.visit(node)
    for node in reversed(list(model.graph)):
        dead = all(not out.uses() and not out.is_graph_output() for out in node.outputs)
        if dead and (op_key(node) in PAIRS or node.op_type == "Cast"):
            model.graph.remove(node, safe=True)
    return StoredTensors(work.tensors, tuple(work.unreadable), tuple(work.mismatched))


class _Stripper:
    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.tensors: dict[str, StoredTensor] = {}
        self.unreadable: list[str] = []
        self.mismatched: list[str] = []
        self._taken = set(values_by_name(graph))

    def visit(self, node: ir.Node) -> None:
        """Record what one node says; bypass it where it ends a pair."""
        value = node.inputs[0] if node.inputs else None
        if value is None or not (op_key(node) in PAIRS or casts_to(node, ir.DataType.FLOAT)):
            return
        source = restored(node)
        if is_quantize(node):
            self._keep(node, self._name_for(node, value))
        elif source is not None:
            self._keep(node, str(source.name))
            node.outputs[0].replace_all_uses_with(source, replace_graph_outputs=True)
        elif is_dequantize(node) or value.dtype is ir.DataType.BFLOAT16:
            self._constant(node, value)

    def _name_for(self, node: ir.Node, value: ir.Value) -> str:
        """Of the tensor; with a second pair, in another scale, a name of its own behind an Identity."""
        known, said = self.tensors.get(str(value.name)), read_quantizer(node)
        if known is None or said is None or _agree(known, said):
            return str(value.name)
        name = self._free(f"{value.name}_again")
        again = ir.Value(name=name, shape=value.shape, type=value.type)
        self.graph.insert_before(node, ir.Node("", "Identity", [value], outputs=[again], name=name))
        node.replace_input_with(0, again)
        return name

    def _constant(self, node: ir.Node, value: ir.Value) -> None:
        codes = constant_array(value)
        if codes is None:
            if is_dequantize(node):  # the graph input itself holds codes
                self._keep(node, str(node.outputs[0].name))
            return
        found = self._keep(node, self._free(str(value.name).removesuffix(CODES)), codes)
        if found is None:
            return
        # Few of those who read the graph read its weights; kept, all of them would fill the memory.
        name, kind, shape = found.name, ir.DataType.FLOAT, ir.Shape(codes.shape)
        content = ir.LazyTensor(lambda: ir.Tensor(found.real(codes), name=name), kind, shape, name=name)
        whole = ir.Value(name=name, shape=shape, type=ir.TensorType(kind), const_value=content)
        self.graph.register_initializer(whole)
        node.outputs[0].replace_all_uses_with(whole, replace_graph_outputs=True)

    def _keep(self, node: ir.Node, name: str, codes: NDArray[Any] | None = None) -> StoredTensor | None:
        """What the node says of the tensor; the first node that says something counts."""
        cast = Quantizer(BFLOAT16, np.ones(()), np.zeros(()))
        said = cast if node.op_type == "Cast" else read_quantizer(node)
        if said is None:
            self.unreadable.append(str(node.name))
            return None
        found = StoredTensor(
            said.dtype, said.scale, said.zero_point, said.axis, said.domain, said.block, name, codes
        )
        if not _agree(self.tensors.setdefault(name, found), found):
            self.mismatched.append(name)
        return found

    def _free(self, wanted: str) -> str:
        name = wanted
        while name in self._taken:
            name += "_float"
        self._taken.add(name)
        return name


def _agree(left: Quantizer, right: Quantizer) -> bool:
    same_scale = np.array_equal(left.scale, right.scale)
    return same_scale and np.array_equal(left.zero_point, right.zero_point)
