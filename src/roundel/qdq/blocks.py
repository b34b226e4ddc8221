"""One tensor in a block format: AMD's operator that rounds and reads back in one step."""

from __future__ import annotations

import onnx_ir as ir

from roundel.qdq.chain import Chain
from roundel.qdq.pairs import QUARK, Names
from roundel.types import BlockScheme, BlockType

_HALF_EVEN = 2
_SHARED_EXPONENT_BITS = {BlockType.MX4: 11, BlockType.MX6: 13, BlockType.MX9: 16}
_ELEMENTS = {
    BlockType.MXFP8E5M2: "fp8_e5m2",
    BlockType.MXFP8E4M3: "fp8_e4m3",
    BlockType.MXFP6E3M2: "fp6_e3m2",
    BlockType.MXFP6E2M3: "fp6_e2m3",
    BlockType.MXFP4E2M1: "fp4_e2m1",
    BlockType.MXINT8: "int8",
}


def block_nodes(
    value: ir.Value, scheme: BlockScheme, names: Names, base: str, out: str, suffix: str = ""
) -> list[ir.Node]:
    """From float32 to the values that the blocks hold, again in float32, in a tensor named `out`."""
    chain = Chain(value, names, base, suffix)
    op, settings = block_attributes(scheme)
    attributes = tuple(ir.convenience.convert_attributes(settings))
    chain.add(op, label="QuantizeDequantize", domain=QUARK, attributes=attributes)
    return chain.end(out)


def block_attributes(scheme: BlockScheme) -> tuple[str, dict[str, str | int]]:
    """The operator of a block format, and its attributes."""
    shared: dict[str, str | int] = {"axis": scheme.axis, "rounding_mode": _HALF_EVEN}
    if scheme.block in _ELEMENTS:
        return "MXQuantizeDequantize", {
            "element_dtype": _ELEMENTS[scheme.block],
            "block_size": 32,
            **shared,
        }
    if scheme.block is BlockType.BFP16:
        return "BFPQuantizeDequantize", {
            "bfp_method": "to_bfp",
            "bit_width": 16,
            "block_size": 8,
            **shared,
        }
    return "BFPQuantizeDequantize", {
        "bfp_method": "to_bfp_prime",
        "bit_width": _SHARED_EXPONENT_BITS[scheme.block],
        "block_size": 16,
        "sub_block_size": 2,
        "sub_block_shift_bits": 1,
        **shared,
    }
