"""BFPQuantizeDequantize and MXQuantizeDequantize: the definitions of the numerics, in standard operators."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from roundel.numerics.block_float import OVERFLOWING_CODE, BlockFloat
from roundel.numerics.float_bits import MANTISSA, SMALLEST_NORMAL, Rounding
from roundel.numerics.micro_exponents import NAN, MicroExponents
from roundel.numerics.microscaling import INTEGER_UNIT, LOWEST_CODE, Microscaling
from roundel.qdq.functions.arithmetic import block_power, exp2, finite, nearest, power
from roundel.qdq.functions.attributes import BFP, BFP_DEFAULTS, MX, MX_DEFAULTS, BlockFormat, read
from roundel.qdq.functions.body import Body
from roundel.qdq.functions.layout import Layout


@dataclass(frozen=True, slots=True)
class Variant:
    """What decides the form of a body. Sizes and widths do not: the body reads them from its node."""

    kind: type[BlockFormat]
    rounding: Rounding
    bfloat16_first: bool = False
    compiler: bool = False
    element_dtype: str = ""

    @staticmethod
    def of(node: ir.Node) -> Variant:
        """As the node's attributes say."""
        form = read(node)
        if isinstance(form, Microscaling):
            integer = form.element.exponent_bits == 0
            rounding = form.rounding if integer else Rounding.HALF_EVEN
            return Variant(Microscaling, rounding, element_dtype=form.element_dtype)
        compiler = isinstance(form, BlockFloat) and form.compiler
        return Variant(type(form), form.rounding, form.bfloat16_first, compiler)

    def __str__(self) -> str:
        names = {BlockFloat: "bfp", MicroExponents: "bfp_prime", Microscaling: self.element_dtype}
        flags = [word for word in ("bfloat16_first", "compiler") if getattr(self, word)]
        return "_".join([names[self.kind], self.rounding.name.lower(), *flags])


def build_bfp(variant: Variant, overload: str, opset: int) -> ir.Function:
    """The body of BFPQuantizeDequantize."""
    body = Body(opset, ("x",))
    source = body.cast(body.inputs[0], ir.DataType.FLOAT)
    if variant.bfloat16_first:
        source = body.cast(body.cast(source, ir.DataType.BFLOAT16), ir.DataType.FLOAT)
    layout = Layout(body, body.inputs[0])
    # Multiples have bit_width - 9 digits: 8 bits of exponent and a sign are not theirs.
    digits = body.op("Sub", body.attribute("bit_width"), body.integers(9))
    if variant.kind is MicroExponents:
        x = layout.cut(source, body.attribute("sub_block_size"))
        result = _micro_exponents(body, layout, x, digits, variant)
    else:
        result = _block_float(body, layout, layout.cut(source), digits, variant)
    return body.function(BFP, overload, layout.joined(result), BFP_DEFAULTS)


def build_mx(variant: Variant, overload: str, opset: int) -> ir.Function:
    """The body of MXQuantizeDequantize."""
    body = Body(opset, ("x",))
    layout = Layout(body, body.inputs[0])
    x = layout.cut(body.cast(body.inputs[0], ir.DataType.FLOAT))
    result = _microscaling(body, layout, x, variant)
    return body.function(MX, overload, layout.joined(result), MX_DEFAULTS)


def _block_float(body: Body, layout: Layout, x: ir.Value, digits: ir.Value, variant: Variant) -> ir.Value:
    op = body.op
    size, number, first = _peak_power(body, x)
    ratio = exp2(body, op("Sub", body.integers(1), digits))  # of a step to the block's power
    largest = op("Sub", exp2(body, digits), body.double(1.0))
    smallest = op("Neg", largest)
    if variant.compiler:
        first = _raised(body, x, size, number, first, ratio, variant)
        steps = op("Reciprocal", ratio)
        largest, smallest = op("Mul", largest, steps), op("Neg", op("Mul", exp2(body, digits), steps))
    step = body.cast(op("Mul", first, ratio), ir.DataType.FLOAT)
    codes = nearest(body, op("Div", x, step), variant.rounding)
    held = op("Mul", _clip(body, codes, smallest, largest), step)
    return op("Where", op("Or", op("Not", number), layout.single), x, held)


def _raised(
    body: Body,
    x: ir.Value,
    size: ir.Value,
    number: ir.Value,
    first: ir.Value,
    ratio: ir.Value,
    variant: Variant,
) -> ir.Value:
    """Twice the power where one of the largest values would round to more than the compiler's 8 bits hold."""
    op, limit = body.op, float(OVERFLOWING_CODE)
    step = body.cast(op("Mul", first, ratio), ir.DataType.FLOAT)
    codes = nearest(body, op("Div", x, step), variant.rounding)
    over = op("Or", op("GreaterOrEqual", codes, body.number(limit)), op("Less", codes, body.number(-limit)))
    # All subnormals have the same exponent field.
    bottom = op("LessOrEqual", first, body.double(2.0**-127))
    threshold = body.cast(op("Where", bottom, body.double(0.0), first), ir.DataType.FLOAT)
    among = op("And", op("GreaterOrEqual", size, threshold), number)
    hit = body.cast(op("And", over, among), ir.DataType.FLOAT)
    found = op("Greater", body.reduce_max(hit, 0), body.number(0.0))
    return op("Where", found, op("Add", first, first), first)


def _micro_exponents(body: Body, layout: Layout, x: ir.Value, digits: ir.Value, variant: Variant) -> ir.Value:
    op = body.op
    size = op("Abs", x)
    infinity = body.number(float("inf"))
    tops = body.reduce_max(op("Where", finite(body, size), size, infinity), 1)
    peaks = body.reduce_max(tops, 0)
    spoilt = op("Equal", peaks, infinity)
    shifts = op("Sub", exp2(body, body.attribute("sub_block_shift_bits")), body.double(1.0))
    lowest = op("Mul", block_power(body, peaks), exp2(body, op("Neg", shifts)))
    first = op("Max", block_power(body, tops), lowest)
    ratio = exp2(body, op("Sub", body.integers(1), digits))
    step = body.cast(op("Mul", first, ratio), ir.DataType.FLOAT)
    largest = op("Sub", exp2(body, digits), body.double(1.0))
    codes = nearest(body, op("Div", x, step), variant.rounding)
    codes = _clip(body, codes, op("Neg", largest), largest)
    # Subnormals are zero, and zeros keep their sign.
    normal = op("GreaterOrEqual", size, body.number(float(SMALLEST_NORMAL)))
    some = op("And", normal, op("Not", op("Equal", codes, body.number(0.0))))
    held = op("Where", some, op("Mul", codes, step), op("Mul", x, body.number(0.0)))
    held = op("Where", spoilt, body.constant(np.asarray(NAN)), held)
    return op("Where", layout.single, x, held)


def _microscaling(body: Body, layout: Layout, x: ir.Value, variant: Variant) -> ir.Value:
    op, element = body.op, Microscaling(variant.element_dtype).element
    _, number, first = _peak_power(body, x)
    scale = body.cast(op("Mul", first, body.double(2.0**-element.top)), ir.DataType.FLOAT)
    scaled = op("Div", x, scale)
    if element.exponent_bits == 0:
        codes = nearest(body, op("Mul", scaled, body.number(2.0**INTEGER_UNIT)), variant.rounding)
        codes = op("Clip", codes, body.number(LOWEST_CODE), body.number(element.largest))
        held = op("Mul", codes, body.number(2.0**-INTEGER_UNIT))
    else:
        own = op("Max", op("Abs", scaled), body.number(2.0**element.bottom))
        # Adding and taking away 1.5 * 2**23 steps rounds to steps, half to even, and leaves no -0.
        steps = body.number(1.5 * 2.0 ** (MANTISSA - element.mantissa_bits))
        magic = op("Mul", power(body, own), steps)
        held = op("Sub", op("Add", scaled, magic), magic)
        held = op("Clip", held, body.number(-element.largest), body.number(element.largest))
    held = op("Mul", scale, held)
    return op("Where", op("Or", op("Not", number), layout.single), x, held)


def _peak_power(body: Body, x: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """|x|, whether it is a number, and the power of two of each block's largest number."""
    size = body.op("Abs", x)
    number = finite(body, size)
    peak = body.reduce_max(body.op("Where", number, size, body.number(0.0)), 0)
    return size, number, block_power(body, peak)


def _clip(body: Body, codes: ir.Value, low: ir.Value, high: ir.Value) -> ir.Value:
    return body.op("Clip", codes, *(body.cast(bound, ir.DataType.FLOAT) for bound in (low, high)))
