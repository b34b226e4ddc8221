"""One tensor in bfloat16 or float16: AMD's quantize and dequantize operators, or plain casts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.model.graph import attribute_float, attribute_int, rank
from roundel.numerics.blocks import BlockFloat, MicroExponents, Microscaling
from roundel.numerics.floats import Rounding, bits, largest
from roundel.qdq.functions.blocks import BlockFormat, operator, written
from roundel.qdq.nodes import QUARK, Chain, Names, constant
from roundel.recipe.settings import Blocks
from roundel.types import BlockScheme, BlockType, FloatType

_FLOAT32_MAX = float(np.finfo(np.float32).max)
ONNX_TYPES = {FloatType.BFLOAT16: ir.DataType.BFLOAT16, FloatType.FLOAT16: ir.DataType.FLOAT16}


@dataclass(frozen=True, slots=True, eq=False)
class FloatCell:
    """How one tensor gets into its type and back.

    Attributes:
        graph: takes the constants.
        names: hands out free ones.
        base: the tensor's name.
        ftype: the type.
        factor: the tensor's scale; None where it is stored as it is.
        form: pair or cast.
        ends: scale and zero point of a pair; the scale alone of a scaled cast.
    """

    graph: ir.Graph
    names: Names
    base: str
    ftype: FloatType
    factor: NDArray[np.float32] | None
    form: Literal["pair", "cast"]
    ends: tuple[ir.Value, ...]

    @staticmethod
    def make(
        graph: ir.Graph,
        names: Names,
        base: str,
        ftype: FloatType,
        factor: NDArray[np.float32] | None,
        form: Literal["pair", "cast"],
    ) -> FloatCell:
        """With the constants that its nodes share."""
        numbers: list[tuple[str, NDArray[Any]]] = []
        if factor is not None or form == "pair":
            numbers.append(("scale", np.asarray(1.0, np.float32) if factor is None else factor))
        if form == "pair":
            numbers.append(("zero_point", np.zeros((), ONNX_TYPES[ftype].numpy())))
        ends = tuple(constant(graph, names(f"{base}_{word}"), number) for word, number in numbers)
        return FloatCell(graph, names, base, ftype, factor, form, ends)

    def there_and_back(self, value: ir.Value, out: str, *, clip: bool, suffix: str = "") -> list[ir.Node]:
        """From float32 to the value that the type holds, again in float32, in a tensor named `out`."""
        chain = Chain(value, self.names, self.base, suffix)
        short = ONNX_TYPES[self.ftype]
        if clip:
            chain.add("Clip", *self._bounds())
        if self.form == "pair":
            chain.add("ExtendedQuantizeLinear", *self.ends, label="QuantizeLinear", domain=QUARK, dtype=short)
        else:
            if self.ends:
                chain.add("Div", *self.ends)
            chain.add("Cast", label="QuantizeLinear", dtype=short, attributes=_to(short))
        self._back(chain)
        return chain.end(out)

    def stored(self, array: NDArray[Any], out: str) -> list[ir.Node]:
        """A constant whose 16 bits are in the file, read into a tensor named `out`."""
        content = array if self.factor is None else array / self.factor
        short = bits(content, self.ftype).view(ONNX_TYPES[self.ftype].numpy())
        codes = constant(self.graph, self.names(f"{self.base}_quantized"), short)
        chain = Chain(codes, self.names, self.base)
        self._back(chain)
        return chain.end(out)

    def _back(self, chain: Chain) -> None:
        if self.form == "pair":
            chain.add("ExtendedDequantizeLinear", *self.ends, label="DequantizeLinear", domain=QUARK)
            return
        chain.add("Cast", label="DequantizeLinear", attributes=_to(ir.DataType.FLOAT))
        if self.ends:
            chain.add("Mul", *self.ends)

    def _bounds(self) -> tuple[ir.Value, ir.Value]:
        """The finite range of the type, in units of the tensor."""
        top = largest(self.ftype) * (1.0 if self.factor is None else float(self.factor))
        bound = np.asarray(min(top, _FLOAT32_MAX), np.float32)
        low = constant(self.graph, self.names(f"{self.base}_lowest"), -bound)
        return low, constant(self.graph, self.names(f"{self.base}_highest"), bound)


def _to(dtype: ir.DataType) -> tuple[ir.Attr, ...]:
    return (ir.AttrInt64("to", dtype.value),)


_AXES_AS_INPUT = 18  # from this opset on, also for ReduceMax and ReduceMean
_EXP = (0.21875, 0.486328125, 1.0, 1.0)  # ((a r + b) r + c) r + d ~ exp(r) on [0, ln 2), in bfloat16


class Bf16Writer:
    """Appends nodes whose results are rounded to bfloat16 after every step."""

    def __init__(self, graph: ir.Graph, names: Names, origin: ir.Node) -> None:
        self.graph, self.names, self.origin = graph, names, origin
        self._last = origin

    def number(self, value: float) -> ir.Value:
        """A float32 scalar."""
        return constant(self.graph, self.names(f"{self.origin.name}_number"), np.asarray(value, np.float32))

    def node(self, op: str, inputs: list[ir.Value], **attributes: int | float | list[int]) -> ir.Value:
        """One plain node."""
        name = self.names(f"{self.origin.name}_{op}")
        out = ir.Value(name=self.names(f"{name}_Output"), type=ir.TensorType(ir.DataType.FLOAT))
        attrs = ir.convenience.convert_attributes(attributes)
        made = ir.Node("", op, inputs, attributes=attrs, outputs=[out], name=name)
        self.graph.insert_after(self._last, made)
        self._last = made
        return out

    def reduce(self, op: str, value: ir.Value, axes: list[int]) -> ir.Value:
        """A reduction that keeps its dimensions; where the axes go depends on operator and opset."""
        if op != "ReduceSum" and self.graph.opset_imports.get("", 17) < _AXES_AS_INPUT:
            return self.node(op, [value], axes=axes, keepdims=1)
        where = constant(self.graph, self.names(f"{self.origin.name}_axes"), np.asarray(axes, np.int64))
        return self.node(op, [value, where], keepdims=1)

    def rounded(self, op: str, inputs: list[ir.Value], **attributes: int | float | list[int]) -> ir.Value:
        """One node, its result rounded to bfloat16."""
        return self.bf16(self.node(op, inputs, **attributes))

    def bf16(self, value: ir.Value) -> ir.Value:
        """Round to bfloat16 and back."""
        half = self.node("Cast", [value], to=ir.DataType.BFLOAT16.value)
        half.type = ir.TensorType(ir.DataType.BFLOAT16)
        return self.node("Cast", [half], to=ir.DataType.FLOAT.value)

    def replace(self, result: ir.Value) -> None:
        """Let the result stand for the origin's output, and remove the origin."""
        old = self.origin.outputs[0]
        name, shape = old.name, old.shape
        old.replace_all_uses_with(result, replace_graph_outputs=True)
        self.graph.remove(self.origin, safe=True)
        old.name, result.name, result.shape = None, name, shape


def softmax(graph: ir.Graph, names: Names, node: ir.Node) -> None:
    """exp(x) = 2**n p(r) with n = floor(x / ln 2), r = x - n ln 2, a cubic p; sum and quotient rounded."""
    write = Bf16Writer(graph, names, node)
    axis = attribute_int(node, "axis", -1)
    source = node.inputs[0]
    assert source is not None
    top = write.reduce("ReduceMax", source, [axis])
    x = write.rounded("Sub", [source, top])
    n = write.node("Floor", [write.rounded("Mul", [x, write.number(1 / math.log(2))])])
    r = write.rounded("Sub", [x, write.rounded("Mul", [n, write.number(math.log(2))])])
    p = write.number(_EXP[0])
    for coefficient in _EXP[1:]:
        p = write.rounded("Add", [write.rounded("Mul", [p, r]), write.number(coefficient)])
    power = write.node("Pow", [write.number(2.0), n])
    e = write.rounded("Mul", [p, power])
    total = write.bf16(write.reduce("ReduceSum", e, [axis]))
    write.replace(write.rounded("Div", [e, total]))


def instance_norm(graph: ir.Graph, names: Names, node: ir.Node) -> bool:
    """(x - mean) / sqrt(var + eps) * scale + bias with every intermediate rounded to bfloat16."""
    source, scale, bias = node.inputs[0], node.inputs[1], node.inputs[2]
    ndim = rank(source)
    if ndim is None or source is None or scale is None or bias is None:
        return False
    write = Bf16Writer(graph, names, node)
    axes = list(range(2, ndim))
    shape = constant(graph, names(f"{node.name}_shape"), np.asarray([1, -1, *[1] * len(axes)], np.int64))
    mean = write.bf16(write.reduce("ReduceMean", source, axes))
    centred = write.rounded("Sub", [source, mean])
    square = write.rounded("Mul", [centred, centred])
    variance = write.bf16(write.reduce("ReduceMean", square, axes))
    shifted = write.rounded("Add", [variance, write.number(attribute_float(node, "epsilon", 1e-5))])
    inverse = write.rounded("Reciprocal", [write.rounded("Sqrt", [shifted])])
    normal = write.rounded("Mul", [centred, inverse])
    scaled = write.rounded("Mul", [normal, write.node("Reshape", [scale, shape])])
    write.replace(write.rounded("Add", [scaled, write.node("Reshape", [bias, shape])]))
    return True


_ELEMENTS = {
    BlockType.MXFP8E5M2: "fp8_e5m2",
    BlockType.MXFP8E4M3: "fp8_e4m3",
    BlockType.MXFP6E3M2: "fp6_e3m2",
    BlockType.MXFP6E2M3: "fp6_e2m3",
    BlockType.MXFP4E2M1: "fp4_e2m1",
    BlockType.MXINT8: "int8",
}
_BITS = {BlockType.BFP16: 16, BlockType.MX4: 11, BlockType.MX6: 13, BlockType.MX9: 16}


def block_format(block: BlockType, options: Blocks) -> BlockFormat:
    """The numbers of a type, with what the recipe changes."""
    rounding = Rounding[options.rounding.upper()]
    if block in _ELEMENTS:
        return Microscaling(_ELEMENTS[block], options.block_size or 32, rounding)
    bits, first = options.bit_width or _BITS[block], options.bfloat16_first
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
