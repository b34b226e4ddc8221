"""Block formats as the attributes of AMD's operators, and back."""

from __future__ import annotations

import onnx_ir as ir

from roundel.errors import ModelError
from roundel.model.graph import attribute_int
from roundel.numerics.block_float import BlockFloat
from roundel.numerics.float_bits import Rounding
from roundel.numerics.micro_exponents import MicroExponents
from roundel.numerics.microscaling import ELEMENTS, Microscaling

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

_METHODS = {
    "to_bfp": BlockFloat,
    "to_bfp_prime": MicroExponents,
    "to_bfp_prime_shared": MicroExponents,  # its old name
}


def operator(form: BlockFormat) -> str:
    """The operator that computes a format."""
    return MX if isinstance(form, Microscaling) else BFP


def written(form: BlockFormat, axis: int) -> dict[str, int | str]:
    """The attributes of a node that computes the format along an axis."""
    common: dict[str, int | str] = {
        "axis": axis,
        "block_size": form.block_size,
        "rounding_mode": int(form.rounding),
    }
    if isinstance(form, Microscaling):
        return {"element_dtype": form.element_dtype, **common}
    common["bit_width"] = form.bit_width
    if form.bfloat16_first:
        common["convert_to_bfloat_before_bfp"] = 1
    if isinstance(form, BlockFloat):
        extra = {"use_compiler_version_cpu_kernel": 1} if form.compiler else {}
        return {"bfp_method": "to_bfp", **common, **extra}
    return {
        "bfp_method": "to_bfp_prime",
        **common,
        "sub_block_size": form.sub_block_size,
        "sub_block_shift_bits": form.sub_block_shift_bits,
    }


def read(node: ir.Node) -> BlockFormat:
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
