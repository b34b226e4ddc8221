"""The operators of finished models, and what one Q or DQ node says about its tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.model.graph import attribute_int, constant_array, op_key, values_by_name
from roundel.types import QParams, QType

QUARK = "com.amd.quark"
QUANTIZE = frozenset({"QuantizeLinear", "com.microsoft::QuantizeLinear", f"{QUARK}::ExtendedQuantizeLinear"})
DEQUANTIZE = frozenset(
    {"DequantizeLinear", "com.microsoft::DequantizeLinear", f"{QUARK}::ExtendedDequantizeLinear"}
)
PAIRS = QUANTIZE | DEQUANTIZE
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
        f"{QUARK}::BFPQuantizeDequantize",
        f"{QUARK}::MXQuantizeDequantize",
    }
)
BFLOAT16 = "bfloat16"
CENTRES = {"int8": 0, "uint8": 128, "int16": 0, "uint16": 32768, "int32": 0}
BITS = {"int8": 8, "uint8": 8, "int16": 16, "uint16": 16, "int32": 32}


@dataclass(frozen=True, eq=False)
class Quantizer:
    """What one Q or DQ node says about its tensor.

    Attributes:
        dtype: element type of the codes.
        scale: one number, or one for each channel.
        zero_point: likewise.
        axis: of the channels, None per tensor.
        domain: of the node.
    """

    dtype: str
    scale: NDArray[np.float64]
    zero_point: NDArray[Any]
    axis: int | None
    domain: str

    @cached_property
    def power_of_two(self) -> bool:
        """Whether every scale is a power of two."""
        mantissa, _ = np.frexp(self.scale)
        return bool((mantissa == 0.5).all())

    @property
    def symmetric(self) -> bool:
        """Whether every zero point is the centre of the type."""
        return self.dtype not in CENTRES or bool((self.zero_point == CENTRES[self.dtype]).all())


def read_quantizer(node: ir.Node) -> Quantizer | None:
    """What a Q or DQ node says; None where its scale or zero point is computed at run time."""
    scale = constant_of(node.inputs[1])
    zero_value = node.inputs[2] if len(node.inputs) > 2 else None
    zero = constant_of(zero_value)
    if scale is None or (zero is None and zero_value is not None):
        return None
    zero = np.zeros(scale.shape, np.int32) if zero is None else zero
    axis = attribute_int(node, "axis", 1) if scale.size > 1 else None
    return Quantizer(stored_type(node), scale.astype(np.float64), zero, axis, node.domain)


def stored_type(node: ir.Node) -> str:
    """The type that a Q writes or a DQ reads, in lower case."""
    zero_point = node.inputs[2] if len(node.inputs) > 2 else None
    codes = node.inputs[0] if op_key(node) in DEQUANTIZE else node.outputs[0]
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


def casts_to(node: ir.Node, kind: ir.DataType) -> bool:
    """Whether the node is a Cast to the type."""
    return op_key(node) == "Cast" and attribute_int(node, "to", 0) == kind.value


@dataclass(frozen=True, eq=False)
class StoredTensor(Quantizer):
    """How one tensor is stored.

    Attributes:
        name: of the float tensor in the stripped graph.
        codes: the content of a constant.
    """

    name: str
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

    @property
    def params(self) -> QParams | None:
        """As the numerics know them; None for types that they do not."""
        try:
            qtype = QType(self.dtype)
        except ValueError:
            return None
        return QParams(self.scale.astype(np.float32), self.zero_point, qtype, self.axis)


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
        if op_key(node) in QUANTIZE:
            source = node.inputs[0]
            found = None if source is None else _read(node, str(source.name), None)
            known = None if source is None else self.tensors.get(str(source.name))
            if source is not None and found is not None and known is not None and not _agree(known, found):
                found = self._again(node, source, found)
            self._keep(node, found)
        elif op_key(node) in DEQUANTIZE:
            self._dequantize(node)
        elif casts_to(node, ir.DataType.FLOAT):
            self._cast_pair(node)

    def _again(self, node: ir.Node, source: ir.Value, found: StoredTensor) -> StoredTensor:
        """A tensor with a second pair, in another scale: a value of its own, behind an Identity."""
        name = self._free(f"{source.name}_again")
        value = ir.Value(name=name, shape=source.shape, type=source.type)
        self.graph.insert_before(node, ir.Node("", "Identity", [source], outputs=[value], name=name))
        node.replace_input_with(0, value)
        return replace(found, name=name)

    def _dequantize(self, node: ir.Node) -> None:
        codes = node.inputs[0]
        if codes is None:
            return
        maker = codes.producer()
        if maker is not None and op_key(maker) in QUANTIZE and maker.inputs[0] is not None:
            tensor = maker.inputs[0]
            found = _read(node, str(tensor.name), None)
            known = self.tensors.get(str(tensor.name))
            if found is None or known is None:
                self._keep(node, found)
            elif not _agree(known, found):
                self.mismatched.append(str(tensor.name))
            self._bypass(node.outputs[0], tensor)
            return
        array = constant_array(codes)
        if array is None:  # the graph input itself holds codes
            self._keep(node, _read(node, str(node.outputs[0].name), None))
            return
        self._constant(node, str(codes.name).removesuffix("_quantized"), array)

    def _constant(self, node: ir.Node, wanted: str, array: NDArray[Any]) -> None:
        found = _read(node, self._free(wanted), array)
        self._keep(node, found)
        if found is None:
            return
        value = _float_constant(found, array)
        self.graph.register_initializer(value)
        self._bypass(node.outputs[0], value)

    def _cast_pair(self, node: ir.Node) -> None:
        narrow = node.inputs[0]
        maker = None if narrow is None else narrow.producer()
        codes = constant_array(narrow)
        if narrow is not None and codes is not None and narrow.dtype is ir.DataType.BFLOAT16:
            self._stored_constant(node, str(narrow.name).removesuffix("_quantized"), codes)
            return
        if maker is None or not casts_to(maker, ir.DataType.BFLOAT16) or maker.inputs[0] is None:
            return
        source = maker.inputs[0]
        name = str(source.name)
        found = StoredTensor(BFLOAT16, np.ones(()), np.zeros(()), None, "", name)
        self.tensors.setdefault(name, found)
        self._bypass(node.outputs[0], source)

    def _stored_constant(self, node: ir.Node, wanted: str, codes: NDArray[Any]) -> None:
        """A constant that the file holds in bfloat16, read by a Cast."""
        name = self._free(wanted)
        found = StoredTensor(BFLOAT16, np.ones(()), np.zeros(()), None, "", name, codes)
        self.tensors[name] = found
        value = _float_constant(found, codes)
        self.graph.register_initializer(value)
        self._bypass(node.outputs[0], value)

    def _free(self, wanted: str) -> str:
        name = wanted
        while name in self._taken:
            name += "_float"
        self._taken.add(name)
        return name

    def _keep(self, node: ir.Node, found: StoredTensor | None) -> None:
        if found is None:
            self.unreadable.append(str(node.name))
        else:
            self.tensors.setdefault(found.name, found)

    def _bypass(self, old: ir.Value, new: ir.Value) -> None:
        for use in list(old.uses()):
            use.node.replace_input_with(use.idx, new)
        for index, value in enumerate(self.graph.outputs):
            if value is old:
                self.graph.outputs[index] = new


def _read(node: ir.Node, name: str, codes: NDArray[Any] | None) -> StoredTensor | None:
    q = read_quantizer(node)
    return None if q is None else StoredTensor(q.dtype, q.scale, q.zero_point, q.axis, q.domain, name, codes)


def _agree(left: StoredTensor, right: StoredTensor) -> bool:
    same_scale = np.array_equal(left.scale, right.scale)
    return same_scale and np.array_equal(left.zero_point, right.zero_point)


def _float_constant(found: StoredTensor, codes: NDArray[Any]) -> ir.Value:
    shape = [1] * codes.ndim
    if found.axis is not None and codes.ndim:
        shape[found.axis % codes.ndim] = -1
    scale, zero = found.scale.reshape(-1), found.zero_point.astype(np.float32).reshape(-1)
    if found.axis is not None and found.scale.ndim == 1:
        scale, zero = scale.reshape(shape), zero.reshape(shape)
    elif found.scale.size > 1:  # blockwise: only the shape matters here
        scale, zero = np.ones(1), np.zeros(1, np.float32)
    array = ((codes.astype(np.float32) - zero) * scale.astype(np.float32)).reshape(codes.shape)
    tensor = ir.tensor(array.astype(np.float32), name=found.name)
    kind = ir.TensorType(ir.DataType.FLOAT)
    return ir.Value(name=found.name, shape=ir.Shape(codes.shape), type=kind, const_value=tensor)
