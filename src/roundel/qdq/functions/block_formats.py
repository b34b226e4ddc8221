"""BFPQuantizeDequantize and MXQuantizeDequantize: the definitions of the numerics, in standard operators."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from roundel.model.graph import attribute_int
from roundel.numerics.block_float import OVERFLOWING_CODE, BlockFloat
from roundel.numerics.float_bits import MANTISSA, SMALLEST_NORMAL
from roundel.numerics.micro_exponents import NAN, MicroExponents
from roundel.numerics.microscaling import INTEGER_UNIT, LOWEST_CODE, Microscaling
from roundel.qdq.functions.arithmetic import block_power, nearest, no_number, power
from roundel.qdq.functions.attributes import BFP_DEFAULTS, MX_DEFAULTS, BlockFormat, operator, read
from roundel.qdq.functions.body import Body
from roundel.qdq.functions.layout import Known, Open, layout_of


@dataclass(frozen=True, slots=True)
class Variant:
    """What decides a body.

    Attributes:
        form: the format. Its numbers are constants of the body: read from the node's attributes, they would
            take a dozen nodes more, and the time to load a session grows with the square of their count.
        layout: how the tensor is cut; None where it has one element.
        half: whether the tensor is float16.
    """

    form: BlockFormat
    layout: Known | Open | None
    half: bool

    @staticmethod
    def of(node: ir.Node) -> Variant:
        """As the node's attributes and its input say."""
        value = node.inputs[0]
        half = value is not None and value.dtype is ir.DataType.FLOAT16
        return Variant(read(node), layout_of(value, attribute_int(node, "axis", 1)), half)

    def __str__(self) -> str:
        form = self.form
        if isinstance(form, Microscaling):
            words = [form.element_dtype, str(form.block_size)]
        elif isinstance(form, MicroExponents):
            words = ["bfp_prime", str(form.bit_width), str(form.block_size)]
            words += [str(form.sub_block_size), str(form.sub_block_shift_bits)]
        else:
            words = ["bfp", str(form.bit_width), str(form.block_size)]
        flags = [word for word in ("compiler", "bfloat16_first") if getattr(form, word, False)]
        words += [form.rounding.name.lower(), *flags, *(["float16"] if self.half else [])]
        return "_".join([*words, str(self.layout or "one")])


def build(variant: Variant, overload: str, opset: int) -> ir.Function:
    """The body of an operator."""
    form, layout = variant.form, variant.layout
    body = Body(opset, ("x",))
    given = body.inputs[0]
    source = body.cast(given, ir.DataType.FLOAT) if variant.half else given
    if not isinstance(form, Microscaling) and form.bfloat16_first:
        source = body.cast(body.cast(source, ir.DataType.BFLOAT16), ir.DataType.FLOAT)
    if layout is None:
        result = source
    else:
        x = layout.cut(body, source, form.block_size)
        held = _held(body, x, form)
        held = layout.passed(body, held, x, given)
        result = layout.joined(body, held, given, form.block_size)
    result = body.op("CastLike", result, given) if variant.half else result
    result = body.op("Identity", result) if result is given else result
    defaults = MX_DEFAULTS if isinstance(form, Microscaling) else BFP_DEFAULTS
    return body.function(operator(form), overload, result, defaults)


def _held(body: Body, x: ir.Value, form: BlockFormat) -> ir.Value:
    """What the blocks hold of x, both (block, lanes)."""
    if isinstance(form, BlockFloat):
        return _block_float(body, x, form)
    if isinstance(form, MicroExponents):
        return _micro_exponents(body, x, form)
    return _microscaling(body, x, form)


def _block_float(body: Body, x: ir.Value, form: BlockFloat) -> ir.Value:
    op, digits = body.op, form.digits
    size, odd, peak = _peak(body, x)
    step = block_power(body, peak, 1 - digits)
    high, low = 2.0**digits - 1, 1 - 2.0**digits
    if form.compiler:
        step = _raised(body, x, size, odd, step, form)
        high, low = 2.0 ** (digits - 1) * high, -(2.0 ** (2 * digits - 1))
    step = body.cast(step, ir.DataType.FLOAT)
    codes = nearest(body, op("Div", x, step), form.rounding)
    held = op("Mul", op("Clip", codes, body.number(low), body.number(high)), step)
    return _merged(body, odd, held, x)


def _raised(
    body: Body, x: ir.Value, size: ir.Value, odd: ir.Value, step: ir.Value, form: BlockFloat
) -> ir.Value:
    """Twice the step where one of the largest values would round to more than the compiler's 8 bits hold."""
    op, limit, ratio = body.op, float(OVERFLOWING_CODE), 2.0 ** (1 - form.digits)
    codes = nearest(body, op("Div", x, body.cast(step, ir.DataType.FLOAT)), form.rounding)
    over = op("Or", op("GreaterOrEqual", codes, body.number(limit)), op("Less", codes, body.number(-limit)))
    # Only values with the block's own exponent count; all subnormals have the same.
    bottom = op("LessOrEqual", step, body.double(2.0**-127 * ratio))
    first = op("Where", bottom, body.double(0.0), op("Mul", step, body.double(1 / ratio)))
    among = op("GreaterOrEqual", size, body.cast(first, ir.DataType.FLOAT))
    among = op("And", among, op("Not", odd))
    hit = body.cast(op("And", over, among), ir.DataType.FLOAT)
    found = op("Greater", body.reduce_max(hit, 0), body.number(0.0))
    return op("Where", found, op("Add", step, step), step)


def _micro_exponents(body: Body, x: ir.Value, form: MicroExponents) -> ir.Value:
    op, sub = body.op, form.sub_block_size
    x = body.reshape(x, [form.block_size // sub, sub, -1])
    size, zeros, infinity = op("Abs", x), op("Mul", x, body.number(0.0)), body.number(float("inf"))
    tops = body.reduce_max(op("Where", no_number(body, zeros), infinity, size), 1)
    peaks = body.reduce_max(tops, 0)
    lowest = block_power(body, peaks, 1 - form.digits - form.reach)
    step = body.cast(op("Max", block_power(body, tops, 1 - form.digits), lowest), ir.DataType.FLOAT)
    codes = nearest(body, op("Div", x, step), form.rounding)
    top = 2.0**form.digits - 1
    codes = op("Clip", codes, body.number(-top), body.number(top))
    # Subnormals are zero, and zeros keep their sign.
    normal = op("GreaterOrEqual", size, body.number(float(SMALLEST_NORMAL)))
    some = op("And", normal, op("Not", op("Equal", codes, body.number(0.0))))
    held = op("Where", some, op("Mul", codes, step), zeros)
    spoilt = op("Equal", peaks, infinity)
    held = op("Where", spoilt, body.constant(np.asarray(NAN)), held)
    return body.reshape(held, [form.block_size, -1])


def _microscaling(body: Body, x: ir.Value, form: Microscaling) -> ir.Value:
    op, element = body.op, form.element
    _, odd, peak = _peak(body, x)
    scale = body.cast(block_power(body, peak, -element.top), ir.DataType.FLOAT)
    scaled = op("Div", x, scale)
    if element.exponent_bits == 0:
        codes = nearest(body, op("Mul", scaled, body.number(2.0**INTEGER_UNIT)), form.rounding)
        codes = op("Clip", codes, body.number(LOWEST_CODE), body.number(element.largest))
        held = op("Mul", codes, body.number(2.0**-INTEGER_UNIT))
    else:
        own = op("Max", op("Abs", scaled), body.number(2.0**element.bottom))
        # Adding and taking away 1.5 * 2**23 steps rounds to steps, half to even, and leaves no -0.
        steps = body.number(1.5 * 2.0 ** (MANTISSA - element.mantissa_bits))
        magic = op("Mul", power(body, own), steps)
        held = op("Sub", op("Add", scaled, magic), magic)
        held = op("Clip", held, body.number(-element.largest), body.number(element.largest))
    return _merged(body, odd, op("Mul", scale, held), x)


def _merged(body: Body, odd: ir.Value, held: ir.Value, x: ir.Value) -> ir.Value:
    """NaN and infinity stay. In this order, since ONNX Runtime's Where makes +0 of -0 in its first branch."""
    return body.op("Where", odd, x, held)


def _peak(body: Body, x: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """|x|, whether it is no number, and the largest number of each block."""
    zero = body.number(0.0)
    size, odd = body.op("Abs", x), no_number(body, body.op("Mul", x, zero))
    return size, odd, body.reduce_max(body.op("Where", odd, zero, size), 0)
