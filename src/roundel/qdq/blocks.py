"""One tensor in a block format: AMD's operator that rounds and reads back in one step."""

from __future__ import annotations

import onnx_ir as ir

from roundel.numerics.block_float import BlockFloat
from roundel.numerics.float_bits import Rounding
from roundel.numerics.micro_exponents import MicroExponents
from roundel.numerics.microscaling import Microscaling
from roundel.qdq.chain import Chain
from roundel.qdq.functions.attributes import BlockFormat, operator, written
from roundel.qdq.pairs import QUARK
from roundel.recipe import Blocks
from roundel.types import BlockScheme, BlockType

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
