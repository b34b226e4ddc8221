"""Which layers compute on 16-bit activations, and which on 8-bit ones."""

from __future__ import annotations

import onnx_ir as ir

from roundel.quark.tools.files import read_model
from roundel.quark.tools.tool import SOURCE, Tool
from roundel.quark.tools.wiring import LAYERS, is_dequantize, numbers

_BITS = {"int8": 8, "uint8": 8, "int16": 16, "uint16": 16}


def a16w8_a8w8_nodes(model: ir.Model) -> tuple[list[str], list[str]]:
    """Names of Conv, ConvTranspose and Gemm nodes with 8-bit activations, and of those with 16-bit ones."""
    found: dict[int, list[str]] = {8: [], 16: []}
    for node in model.graph:
        maker = node.inputs[0].producer() if node.op_type in LAYERS and node.inputs[0] is not None else None
        given = numbers(maker) if maker is not None and is_dequantize(maker) else None
        bits = _BITS.get(given[1].dtype.name) if given is not None else None
        if bits is not None:
            found[bits].append(str(node.name))
    return found[8], found[16]


def _print(source: str) -> str:
    eight, sixteen = a16w8_a8w8_nodes(read_model(source))
    lines = ["8-bit activations:", *eight, "16-bit activations:", *sixteen]
    return "\n".join([*lines, f"{len(eight)} layers with 8-bit, {len(sixteen)} with 16-bit activations"])


PRINT_NODES = Tool(
    "print_a16w8_a8w8_nodes",
    "Lists the layers with 8-bit and with 16-bit activations.",
    _print,
    (SOURCE,),
    {"a16w8_a8w8_nodes": lambda path: a16w8_a8w8_nodes(read_model(path))},
)
