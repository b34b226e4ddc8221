"""Exact arithmetic on floats in standard operators: powers of two, and rounding with its ties."""

from __future__ import annotations

import onnx_ir as ir

from roundel.numerics import float_bits as fb
from roundel.numerics.float_bits import Rounding
from roundel.qdq.functions.body import Body

_SMALLEST_POWER = 2.0**-127  # stands for the exponent field 0, of zero and of subnormals


def no_number(body: Body, zeros: ir.Value) -> ir.Value:
    """Whether x is infinite or NaN, given 0 * x."""
    return body.op("IsNaN", zeros)


def block_power(body: Body, peak: ir.Value, shift: int) -> ir.Value:
    """In float64, 2**shift times the power of two at or below |x|, or 2**-127 where |x| is not normal.

    A difference of two roundings leaves the first bit alone: with f = (2**52 + 1) x, it is f - (1 - 2**-53) f
    (Rump, Ogita and Oishi, "Accurate floating-point summation", 2008). In float64 no float32 comes near
    overflow or underflow.
    """
    wide = body.cast(peak, ir.DataType.DOUBLE)
    factor = 2.0**shift
    return body.op("Max", _first_bit(body, wide, 52, factor), body.double(_SMALLEST_POWER * factor))


def power(body: Body, magnitude: ir.Value) -> ir.Value:
    """The same in float32, for values between 2**-64 and 2**64."""
    return _first_bit(body, magnitude, 23, 1.0)


def _first_bit(body: Body, value: ir.Value, mantissa: int, factor: float) -> ir.Value:
    number = body.number if mantissa == fb.MANTISSA else body.double
    spread = body.op("Mul", value, number((2.0**mantissa + 1) * factor))
    if mantissa == fb.MANTISSA:
        return body.op("Sub", spread, body.op("Mul", spread, number(1 - 2.0 ** -(mantissa + 1))))
    # ONNX Runtime takes a float64 factor this near to 1 for 1 and drops it; this is the same in two steps.
    less = body.op("Sub", spread, body.op("Mul", spread, number(2.0 ** -(mantissa + 1))))
    return body.op("Sub", spread, less)


def nearest(body: Body, ratio: ir.Value, rounding: Rounding) -> ir.Value:
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
