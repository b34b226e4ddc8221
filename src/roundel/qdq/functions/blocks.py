"""Block formats as the attributes of AMD's operators, and back."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from roundel.errors import ModelError
from roundel.model.graph import attribute_int
from roundel.numerics.blocks import (
    ELEMENTS,
    INTEGER_UNIT,
    LOWEST_CODE,
    NAN,
    OVERFLOWING_CODE,
    BlockFloat,
    MicroExponents,
    Microscaling,
)
from roundel.numerics.floats import MANTISSA, SMALLEST_NORMAL, Rounding
from roundel.qdq.functions.body import Body, block_power, nearest_whole, power_below
from roundel.qdq.nodes import QUARK, Chain
from roundel.recipe.settings import Blocks
from roundel.types import BlockScheme, BlockType

BlockFormat = BlockFloat | MicroExponents | Microscaling

BFP = "BFPQuantizeDequantize"
MX = "MXQuantizeDequantize"
BFP_DEFAULTS: dict[str, int | str] = {
    "bfp_method": "to_bfp",
    "axis": 1,
    "bit_width": 16,
    "block_size": 8,
    "rounding_mode": 0,
    "sub_block_size": 2,
    "sub_block_shift_bits": 1,
    "convert_to_bfloat_before_bfp": 0,
    "use_compiler_version_cpu_kernel": 0,
}
"""What AMD's operator takes where a node says nothing."""
MX_DEFAULTS: dict[str, int | str] = {"element_dtype": "int8", "axis": 1, "block_size": 32, "rounding_mode": 0}

# The last one is the old name of the one before.
_METHODS = {"to_bfp": BlockFloat, "to_bfp_prime": MicroExponents, "to_bfp_prime_shared": MicroExponents}


def operator(form: BlockFormat) -> str:
    """The operator that computes a format."""
    return MX if isinstance(form, Microscaling) else BFP


def written(form: BlockFormat, axis: int) -> dict[str, int | str]:
    """The attributes of a node that computes the format along an axis."""
    common: dict[str, int | str] = {"axis": axis, "block_size": form.block_size}
    common["rounding_mode"] = int(form.rounding)
    if isinstance(form, Microscaling):
        return {"element_dtype": form.element_dtype, **common}
    common["bit_width"] = form.bit_width
    if form.bfloat16_first:
        common["convert_to_bfloat_before_bfp"] = 1
    if isinstance(form, BlockFloat):
        extra = {"use_compiler_version_cpu_kernel": 1} if form.compiler else {}
        return {"bfp_method": "to_bfp", **common, **extra}
    subs = {"sub_block_size": form.sub_block_size, "sub_block_shift_bits": form.sub_block_shift_bits}
    return {"bfp_method": "to_bfp_prime", **common, **subs}


def read_format(node: ir.Node) -> BlockFormat:
    """The format that a node computes.

    Raises:
        ModelError: an attribute that AMD's operator does not know either.
    """
    if node.op_type == MX:
        element = _string(node, "element_dtype", MX_DEFAULTS, tuple(ELEMENTS))
        return Microscaling(element, _int(node, "block_size", MX_DEFAULTS, (1, 1 << 30)), _rounding(node))
    kind = _METHODS[_string(node, "bfp_method", BFP_DEFAULTS, tuple(_METHODS))]
    bits = _int(node, "bit_width", BFP_DEFAULTS, (10, 32))
    block = _int(node, "block_size", BFP_DEFAULTS, (1, 1 << 30))
    first = _int(node, "convert_to_bfloat_before_bfp", BFP_DEFAULTS) != 0
    if kind is BlockFloat:
        compiler = _int(node, "use_compiler_version_cpu_kernel", BFP_DEFAULTS) != 0
        return BlockFloat(bits, block, _rounding(node), compiler, first)
    sub = _int(node, "sub_block_size", BFP_DEFAULTS, (1, block))
    if block % sub:
        raise ModelError(
            "Sub-blocks do not fill their block.",
            where=f"node {node.name}",
            observed=f"block_size {block}, sub_block_size {sub}",
            expected="a sub-block size that divides the block size",
        )
    shift = _int(node, "sub_block_shift_bits", BFP_DEFAULTS, (0, 8))
    return MicroExponents(bits, block, sub, shift, _rounding(node), first)


def _rounding(node: ir.Node) -> Rounding:
    return Rounding(_int(node, "rounding_mode", BFP_DEFAULTS, (0, 2)))


def _int(
    node: ir.Node, name: str, defaults: dict[str, int | str], limits: tuple[int, int] | None = None
) -> int:
    value = attribute_int(node, name, int(defaults[name]))
    if limits is not None and not limits[0] <= value <= limits[1]:
        raise ModelError(
            f"{node.op_type} has an attribute out of range.",
            where=f"node {node.name}",
            observed=f"{name} {value}",
            expected=f"{limits[0]} to {limits[1]}",
        )
    return value


def _string(node: ir.Node, name: str, defaults: dict[str, int | str], known: tuple[str, ...]) -> str:
    given = node.attributes.get(name)
    value = str(defaults[name]) if given is None else given.as_string()
    if value not in known:
        raise ModelError(
            f"{node.op_type} has an attribute that it does not know.",
            where=f"node {node.name}",
            observed=f"{name} {value!r}",
            expected=f"one of {', '.join(known)}",
        )
    return value


@dataclass(frozen=True, slots=True)
class Known:
    """Lines of known length, so that the body has no arithmetic on sizes: sessions load faster.

    Attributes:
        length: values along the axis.
        inner: product of the sizes behind the axis.
    """

    length: int
    inner: int

    def __str__(self) -> str:
        return f"{self.length}x{self.inner}"

    def cut(self, body: Body, x: ir.Value, size: int) -> ir.Value:
        """(block, lanes)."""
        blocks, padded = -(-self.length // size), self._padded(size)
        if padded != self.length:
            lines = body.reshape(x, [-1, self.length, self.inner])
            pads = body.integers([0, 0, 0, 0, padded - self.length, 0])
            x = body.op("Pad", lines, pads, body.number(0.0))
        cut = body.reshape(x, [-1, blocks, size, self.inner])
        # The Reshape behind it keeps ONNX Runtime from moving the Transpose behind the arithmetic.
        return body.reshape(body.op("Transpose", cut, perm=[2, 0, 1, 3]), [size, -1])

    def joined(self, body: Body, held: ir.Value, x: ir.Value, size: int) -> ir.Value:
        """The shape of x again."""
        blocks, padded = -(-self.length // size), self._padded(size)
        upright = body.reshape(held, [size, -1, blocks, self.inner])
        result = body.op("Transpose", upright, perm=[1, 2, 0, 3])
        if padded != self.length:
            lines = body.reshape(result, [-1, padded, self.inner])
            ends = [body.integers([number]) for number in (0, self.length, 1)]
            result = body.op("Slice", lines, *ends)
        return body.op("Reshape", result, body.op("Shape", x))

    def passed(self, body: Body, held: ir.Value, cut: ir.Value, x: ir.Value) -> ir.Value:
        """What is held: there is more than one element."""
        return held

    def _padded(self, size: int) -> int:
        return -(-self.length // size) * size


@dataclass(frozen=True, slots=True)
class Open:
    """Any rank, any sizes, all found at run time."""

    axis: int

    def __str__(self) -> str:
        return f"axis_{self.axis}".replace("-", "m")

    def cut(self, body: Body, x: ir.Value, size: int) -> ir.Value:
        """(block, lanes)."""
        op = body.op
        sizes = self._sizes(body, x, size)
        lines = self._reshape(body, x, sizes.outer, sizes.length, sizes.inner)
        missing = op("Sub", sizes.padded, sizes.length)
        pads = op("Concat", body.integers([0, 0, 0, 0]), missing, body.integers([0]), axis=0)
        whole = op("Pad", lines, pads, body.number(0.0))
        block = body.integers([size])
        cut = self._reshape(body, whole, sizes.outer, sizes.blocks, block, sizes.inner)
        upright = op("Transpose", cut, perm=[2, 0, 1, 3])
        lanes = op("Mul", op("Mul", sizes.outer, sizes.blocks), sizes.inner)
        return self._reshape(body, upright, block, lanes)

    def joined(self, body: Body, held: ir.Value, x: ir.Value, size: int) -> ir.Value:
        """The shape of x again."""
        op = body.op
        sizes = self._sizes(body, x, size)
        upright = self._reshape(body, held, body.integers([size]), sizes.outer, sizes.blocks, sizes.inner)
        cut = op("Transpose", upright, perm=[1, 2, 0, 3])
        lines = self._reshape(body, cut, sizes.outer, sizes.padded, sizes.inner)
        kept = op("Slice", lines, body.integers([0]), sizes.length, body.integers([1]))
        return op("Reshape", kept, sizes.shape, allowzero=1)

    def passed(self, body: Body, held: ir.Value, cut: ir.Value, x: ir.Value) -> ir.Value:
        """What is held, or the tensor itself where it has one element. Gather, unlike Where, keeps a -0."""
        op, first = body.op, body.integers([0])
        both = op("Concat", op("Unsqueeze", held, first), op("Unsqueeze", cut, first), axis=0)
        single = op("Equal", op("Size", x), body.integers(1))
        return op("Gather", both, body.cast(single, ir.DataType.INT64), axis=0)

    def _sizes(self, body: Body, x: ir.Value, size: int) -> _Sizes:
        op, one = body.op, body.integers([1])
        shape = op("Shape", x)
        rank = op("Shape", shape)
        axis = body.integers([self.axis])
        if self.axis < 0:
            axis = op("Add", axis, rank)
        axis = op("Where", op("Less", rank, body.integers([2])), body.integers([0]), axis)
        after = op("Add", axis, one)
        outer, length, inner = (
            op("ReduceProd", op("Slice", shape, *ends), keepdims=1)
            for ends in ((body.integers([0]), axis), (axis, after), (after, rank))
        )
        block = body.integers([size])
        blocks = op("Div", op("Add", length, body.integers([size - 1])), block)
        return _Sizes(shape, outer, length, inner, blocks, op("Mul", blocks, block))

    def _reshape(self, body: Body, value: ir.Value, *sizes: ir.Value) -> ir.Value:
        return body.op("Reshape", value, body.op("Concat", *sizes, axis=0), allowzero=1)


@dataclass(frozen=True, slots=True, eq=False)
class _Sizes:
    """Of a tensor as outer x length x inner; vectors of one number each, but for the shape."""

    shape: ir.Value
    outer: ir.Value
    length: ir.Value
    inner: ir.Value
    blocks: ir.Value
    padded: ir.Value


def layout_of(value: ir.Value | None, axis: int) -> Known | Open | None:
    """How to cut a tensor; None for one element, which AMD's operators pass on."""
    shape = value.shape if value is not None else None
    if shape is None:
        return Open(axis)
    sizes = list(shape)
    if all(size == 1 for size in sizes):
        return None
    place = 0 if len(sizes) == 1 else axis % len(sizes)  # of a vector, whatever the axis says
    line = sizes[place:]
    if not all(isinstance(size, int) and size > 0 for size in line) or 0 in sizes:
        return Open(axis)
    numbers = [int(size) for size in line]  # type: ignore[arg-type]
    return Open(axis) if math.prod(numbers) == 1 else Known(numbers[0], math.prod(numbers[1:]))


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
        return Variant(read_format(node), layout_of(value, attribute_int(node, "axis", 1)), half)

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
        if isinstance(form, BlockFloat):
            held = _block_float(body, x, form)
        elif isinstance(form, MicroExponents):
            held = _micro_exponents(body, x, form)
        else:
            held = _microscaling(body, x, form)
        result = layout.joined(body, layout.passed(body, held, x, given), given, form.block_size)
    result = body.op("CastLike", result, given) if variant.half else result
    result = body.op("Identity", result) if result is given else result
    defaults = MX_DEFAULTS if isinstance(form, Microscaling) else BFP_DEFAULTS
    return body.function(operator(form), overload, result, defaults)


def _block_float(body: Body, x: ir.Value, form: BlockFloat) -> ir.Value:
    op, digits = body.op, form.digits
    size, odd, peak = _peak(body, x)
    step = block_power(body, peak, 1 - digits)
    high, low = 2.0**digits - 1, 1 - 2.0**digits
    if form.compiler:
        step = _raised(body, x, size, odd, step, form)
        high, low = 2.0 ** (digits - 1) * high, -(2.0 ** (2 * digits - 1))
    step = body.cast(step, ir.DataType.FLOAT)
    codes = nearest_whole(body, op("Div", x, step), form.rounding)
    held = op("Mul", op("Clip", codes, body.number(low), body.number(high)), step)
    return _merged(body, odd, held, x)


def _raised(
    body: Body, x: ir.Value, size: ir.Value, odd: ir.Value, step: ir.Value, form: BlockFloat
) -> ir.Value:
    """Twice the step where one of the largest values would round to more than the compiler's 8 bits hold."""
    op, limit, ratio = body.op, float(OVERFLOWING_CODE), 2.0 ** (1 - form.digits)
    codes = nearest_whole(body, op("Div", x, body.cast(step, ir.DataType.FLOAT)), form.rounding)
    over = op("Or", op("GreaterOrEqual", codes, body.number(limit)), op("Less", codes, body.number(-limit)))
    # Only values with the block's own exponent count; all subnormals have the same.
    bottom = op("LessOrEqual", step, body.double(2.0**-127 * ratio))
    first = op("Where", bottom, body.double(0.0), op("Mul", step, body.double(1 / ratio)))
    among = op("And", op("GreaterOrEqual", size, body.cast(first, ir.DataType.FLOAT)), op("Not", odd))
    hit = body.cast(op("And", over, among), ir.DataType.FLOAT)
    found = op("Greater", body.reduce_max(hit, 0), body.number(0.0))
    return op("Where", found, op("Add", step, step), step)


def _micro_exponents(body: Body, x: ir.Value, form: MicroExponents) -> ir.Value:
    op, sub = body.op, form.sub_block_size
    x = body.reshape(x, [form.block_size // sub, sub, -1])
    size, zeros, infinity = op("Abs", x), op("Mul", x, body.number(0.0)), body.number(float("inf"))
    tops = body.reduce_max(op("Where", op("IsNaN", zeros), infinity, size), 1)
    peaks = body.reduce_max(tops, 0)
    lowest = block_power(body, peaks, 1 - form.digits - form.reach)
    step = body.cast(op("Max", block_power(body, tops, 1 - form.digits), lowest), ir.DataType.FLOAT)
    codes = nearest_whole(body, op("Div", x, step), form.rounding)
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
        codes = nearest_whole(body, op("Mul", scaled, body.number(2.0**INTEGER_UNIT)), form.rounding)
        codes = op("Clip", codes, body.number(LOWEST_CODE), body.number(element.largest))
        held = op("Mul", codes, body.number(2.0**-INTEGER_UNIT))
    else:
        own = op("Max", op("Abs", scaled), body.number(2.0**element.bottom))
        # Adding and taking away 1.5 * 2**23 steps rounds to steps, half to even, and leaves no -0.
        steps = body.number(1.5 * 2.0 ** (MANTISSA - element.mantissa_bits))
        magic = op("Mul", power_below(body, own), steps)
        held = op("Sub", op("Add", scaled, magic), magic)
        held = op("Clip", held, body.number(-element.largest), body.number(element.largest))
    return _merged(body, odd, op("Mul", scale, held), x)


def _merged(body: Body, odd: ir.Value, held: ir.Value, x: ir.Value) -> ir.Value:
    """NaN and infinity stay. In this order, since ONNX Runtime's Where makes +0 of -0 in its first branch."""
    return body.op("Where", odd, x, held)


def _peak(body: Body, x: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """|x|, whether it is no number, and the largest number of each block."""
    zero = body.number(0.0)
    size = body.op("Abs", x)
    odd = body.op("IsNaN", body.op("Mul", x, zero))  # infinity times zero is NaN, too
    return size, odd, body.reduce_max(body.op("Where", odd, zero, size), 0)


ELEMENT_OF = {BlockType(f"mx{name.replace('_', '')}"): name for name in ELEMENTS}
WIDTHS = {BlockType.BFP16: 16, BlockType.MX4: 11, BlockType.MX6: 13, BlockType.MX9: 16}
"""The element or the width that names a format of AMD's operators."""


def block_format(block: BlockType, options: Blocks) -> BlockFormat:
    """The numbers of a type, with what the recipe changes."""
    rounding = Rounding[options.rounding.upper()]
    if block in ELEMENT_OF:
        return Microscaling(ELEMENT_OF[block], options.block_size or 32, rounding)
    bits, first = options.bit_width or WIDTHS[block], options.bfloat16_first
    if block is BlockType.BFP16:
        return BlockFloat(bits, options.block_size or 8, rounding, options.compiler, first)
    sub_block = options.sub_block_size, options.sub_block_shift_bits
    return MicroExponents(bits, options.block_size or 16, *sub_block, rounding, first)


def block_nodes(chain: Chain, scheme: BlockScheme, options: Blocks, out: str) -> list[ir.Node]:
    """From float32 to the values that the blocks hold, again in float32, in a tensor named `out`."""
    form = block_format(scheme.block, options)
    attributes = tuple(ir.convenience.convert_attributes(written(form, scheme.axis)))
    chain.add(operator(form), label="QuantizeDequantize", domain=QUARK, attributes=attributes)
    return chain.end(out)
