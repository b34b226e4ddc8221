"""ExtendedQuantizeLinear and ExtendedDequantizeLinear of the 16-bit floats."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from roundel.errors import ModelError
from roundel.numerics import floats
from roundel.qdq.functions.body import Body

_DEFAULTS: dict[str, int | str] = {"axis": 1}
_TYPES = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16)


@dataclass(frozen=True, slots=True)
class LinearFunction:
    """What decides the body: the stored type, and whether the scale has an axis."""

    dtype: ir.DataType
    per_channel: bool

    @staticmethod
    def of(node: ir.Node) -> LinearFunction:
        """As the node's inputs say.

        Raises:
            ModelError: the type is none of the 16-bit floats.
        """
        scale, zero = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
        dtype = zero.dtype if zero is not None else None
        if dtype not in _TYPES or dtype is None:
            raise ModelError(
                f"{node.op_type} of this type has no function body.",
                where=f"node {node.name}",
                observed=f"a zero point of type {dtype.name if dtype else 'unknown'}",
                expected="BFLOAT16 or FLOAT16",
                hint="Integer types are written as QuantizeLinear and DequantizeLinear.",
            )
        if dtype is ir.DataType.FLOAT16:
            _require_zero(node, zero)
        shape = scale.shape if scale is not None else None
        single = shape is not None and all(size == 1 for size in shape)
        return LinearFunction(dtype, not single)

    def __str__(self) -> str:
        return f"{self.dtype.name.lower()}{'_per_channel' if self.per_channel else ''}"


def quantize_function(variant: LinearFunction, overload: str, opset: int) -> ir.Function:
    """round(x / scale + zero point). Float16 saturates; bfloat16 overflows to infinity."""
    body = Body(opset, ("x", "y_scale", "y_zero_point"))
    x, scale, zero = body.inputs
    scaled = body.op("Div", x, _spread(body, variant, scale, x))
    if variant.dtype is ir.DataType.FLOAT16:
        # Min and Max keep a NaN, which Clip need not.
        below = body.op("Min", scaled, body.number(floats.LARGEST_FLOAT16))
        moved = body.op("Max", below, body.number(-floats.LARGEST_FLOAT16))
    else:
        # Adding zero makes +0 of -0. ONNX Runtime would drop Add, but keeps Sum.
        offset = body.cast(_spread(body, variant, zero, x), ir.DataType.FLOAT)
        moved = body.op("Sum", scaled, offset)
    return body.function("ExtendedQuantizeLinear", overload, body.op("CastLike", moved, zero), _DEFAULTS)


def dequantize_function(variant: LinearFunction, overload: str, opset: int) -> ir.Function:
    """(codes - zero point) * scale."""
    body = Body(opset, ("x", "x_scale", "x_zero_point"))
    x, scale, zero = body.inputs
    values = body.cast(x, ir.DataType.FLOAT)
    if variant.dtype is not ir.DataType.FLOAT16:
        offset = body.cast(_spread(body, variant, zero, x), ir.DataType.FLOAT)
        values = body.op("Sub", values, offset)
    result = body.op("Mul", values, _spread(body, variant, scale, x))
    return body.function("ExtendedDequantizeLinear", overload, result, _DEFAULTS)


def _spread(body: Body, variant: LinearFunction, value: ir.Value, x: ir.Value) -> ir.Value:
    """One number for each channel, shaped so that it broadcasts along the axis of x."""
    if not variant.per_channel:
        return value
    rank = body.op("Shape", body.op("Shape", x))
    rank = body.op("Squeeze", rank)
    axis = body.attribute("axis")
    axis = body.op("Where", body.op("Less", axis, body.integers(0)), body.op("Add", axis, rank), axis)
    places = body.op("Range", body.integers(0), rank, body.integers(1))
    shape = body.op("Where", body.op("Equal", places, axis), body.integers(-1), body.integers(1))
    return body.op("Reshape", value, shape)


def _require_zero(node: ir.Node, zero: ir.Value | None) -> None:
    given = zero.const_value if zero is not None else None
    if given is not None and np.asarray(given.numpy(), np.float32).any():
        raise ModelError(
            "A float16 pair has a zero point other than 0.",
            where=f"node {node.name}",
            expected="a zero point of 0: AMD's operators ignore any other",
        )
