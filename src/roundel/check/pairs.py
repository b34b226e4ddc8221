"""The operators of finished models, and what one Q or DQ node says about its tensor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.model.graph import attribute_int, op_key

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
