"""How the nodes, tensors and constants that store a tensor are called, here and in other tools' files."""

from __future__ import annotations

import onnx_ir as ir

from roundel.model.graph import iter_values

MICROSOFT = "com.microsoft"
QUARK = "com.amd.quark"

CODES = "_quantized"  # of a constant's codes
BEFORE = "_QuantizeLinear_Input"  # of a graph output's tensor, which its pair's output took the name of
AFTER = "_DequantizeLinear_Output"
_APPENDED = (BEFORE, AFTER, "_DequantizeLinear", "_QuantizeInput", "_dequantized")


def bare_name(name: str) -> str:
    """A tensor's name without what quantizers append."""
    for suffix in _APPENDED:
        if name.endswith(suffix) and name != suffix:
            return bare_name(name.removesuffix(suffix))
    return name


class Names:
    """Names that no other tensor or node of the graph has."""

    def __init__(self, graph: ir.Graph) -> None:
        self._taken = {str(v.name) for v in iter_values(graph)} | {str(n.name) for n in graph}
        for inner in graph.subgraphs():  # whose names must not repeat those around them
            made = (*inner.inputs, *inner.initializers.values(), *(v for n in inner for v in n.outputs))
            self._taken |= {str(v.name) for v in made}

    def __call__(self, wanted: str) -> str:
        """`wanted`, or `wanted_1` and so on when it is taken."""
        name, count = wanted, 0
        while name in self._taken:
            count += 1
            name = f"{wanted}_{count}"
        self._taken.add(name)
        return name
