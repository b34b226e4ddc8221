"""Writes the body of a model-local function, node by node, in standard operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import ArrayLike, NDArray

from roundel.errors import ModelError
from roundel.numerics import floats
from roundel.numerics.floats import Rounding
from roundel.qdq.nodes import QUARK

_AXES_AS_INPUT = 18  # from this opset on, also for ReduceMax


class Body:
    """A function under construction.

    Attributes:
        opset: version of the standard operators, the model's own.
    """

    def __init__(self, opset: int, inputs: tuple[str, ...]) -> None:
        self.opset = opset
        self.inputs = tuple(ir.Value(name=name) for name in inputs)
        self._nodes: list[ir.Node] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}
        self._attributes: dict[str, ir.Value] = {}

    def op(self, op_type: str, *inputs: ir.Value, **attributes: int | float | list[int]) -> ir.Value:
        """One node with one output."""
        attrs = ir.convenience.convert_attributes(attributes)
        return self._append(op_type, inputs, attrs)

    def constant(self, array: NDArray[Any]) -> ir.Value:
        """A tensor; equal ones are written once."""
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            tensor = ir.tensor(array)
            self._constants[key] = self._append("Constant", (), [ir.AttrTensor("value", tensor)])
        return self._constants[key]

    def number(self, value: float) -> ir.Value:
        """A float32 scalar."""
        return self.constant(np.asarray(value, np.float32))

    def double(self, value: float) -> ir.Value:
        """A float64 scalar."""
        return self.constant(np.asarray(value, np.float64))

    def integers(self, values: ArrayLike) -> ir.Value:
        """An int64 tensor."""
        return self.constant(np.asarray(values, np.int64))

    def attribute(self, name: str) -> ir.Value:
        """An integer attribute of the calling node, as a scalar."""
        if name not in self._attributes:
            reference = ir.RefAttr("value_int", name, ir.AttributeType.INT)
            self._attributes[name] = self._append("Constant", (), [reference])
        return self._attributes[name]

    def cast(self, value: ir.Value, to: ir.DataType) -> ir.Value:
        """Another element type."""
        return self.op("Cast", value, to=to.value)

    def reshape(self, value: ir.Value, sizes: list[int]) -> ir.Value:
        """Another shape; one size may be -1."""
        return self.op("Reshape", value, self.integers(sizes))

    def reduce_max(self, value: ir.Value, axis: int) -> ir.Value:
        """The largest along an axis, which stays with length 1."""
        if self.opset < _AXES_AS_INPUT:
            return self.op("ReduceMax", value, axes=[axis], keepdims=1)
        return self.op("ReduceMax", value, self.integers([axis]), keepdims=1)

    def function(
        self, name: str, overload: str, output: ir.Value, defaults: dict[str, int | str]
    ) -> ir.Function:
        """The finished function."""
        graph = ir.Graph(
            self.inputs, [output], nodes=self._nodes, opset_imports={"": self.opset}, name=f"{name}_body"
        )
        attributes = ir.convenience.convert_attributes(defaults)
        return ir.Function(QUARK, name, overload, graph=graph, attributes=attributes)

    def _append(self, op_type: str, inputs: tuple[ir.Value, ...], attributes: list[ir.Attr]) -> ir.Value:
        out = ir.Value(name=f"v{len(self._nodes)}")
        self._nodes.append(
            ir.Node("", op_type, inputs, attributes=attributes, outputs=[out], name=f"n{len(self._nodes)}")
        )
        return out


_SMALLEST_POWER = 2.0**-127  # stands for the exponent field 0, of zero and of subnormals


def block_power(body: Body, peak: ir.Value, shift: int) -> ir.Value:
    """In float64, 2**shift times the power of two at or below |x|, or 2**-127 where |x| is not normal.

    A difference of two roundings leaves the first bit alone: with f = (2**52 + 1) x, it is f - (1 - 2**-53) f
    (Rump, Ogita and Oishi, "Accurate floating-point summation", 2008). In float64 no float32 comes near
    overflow or underflow.
    """
    wide = body.cast(peak, ir.DataType.DOUBLE)
    factor = 2.0**shift
    return body.op("Max", _first_bit(body, wide, 52, factor), body.double(_SMALLEST_POWER * factor))


def power_below(body: Body, magnitude: ir.Value) -> ir.Value:
    """The same in float32, for values between 2**-64 and 2**64."""
    return _first_bit(body, magnitude, 23, 1.0)


def _first_bit(body: Body, value: ir.Value, mantissa: int, factor: float) -> ir.Value:
    number = body.number if mantissa == floats.MANTISSA else body.double
    spread = body.op("Mul", value, number((2.0**mantissa + 1) * factor))
    if mantissa == floats.MANTISSA:
        return body.op("Sub", spread, body.op("Mul", spread, number(1 - 2.0 ** -(mantissa + 1))))
    # ONNX Runtime takes a float64 factor this near to 1 for 1 and drops it; this is the same in two steps.
    less = body.op("Sub", spread, body.op("Mul", spread, number(2.0 ** -(mantissa + 1))))
    return body.op("Sub", spread, less)


def nearest_whole(body: Body, ratio: ir.Value, rounding: Rounding) -> ir.Value:
    """Whole numbers, with the same zeros as `float_bits.nearest`."""
    op = body.op
    whole = op("Round", ratio)
    rest = op("Sub", ratio, whole)
    if rounding is Rounding.HALF_EVEN:
        return op("Sub", ratio, rest)
    if rounding is Rounding.HALF_UP:
        up = op("Equal", rest, body.number(0.5))
        return op("Where", up, op("Add", whole, body.number(1.0)), whole)
    tie = op("Equal", op("Abs", rest), body.number(0.5))
    outward = op("Greater", op("Mul", rest, ratio), body.number(0.0))
    away = op("And", tie, outward)
    return op("Where", away, op("Add", whole, op("Add", rest, rest)), whole)


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
    rank = body.op("Squeeze", body.op("Shape", body.op("Shape", x)))
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
