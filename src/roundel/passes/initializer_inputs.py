"""Weights leave the list of graph inputs."""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from roundel.passes.base import Pass

# From this version on, an initializer need not be a graph input.
_FIRST_IR_VERSION = 4


class InitializerInputs(Pass):
    """Makes initializers that are also graph inputs plain constants. Exact for their default values.

    Old exporters list every weight as an input. A weight that a caller may replace cannot be folded or
    quantized, and ONNX Runtime does not count it among the inputs of a session either.
    """

    name: ClassVar[str] = "initializer inputs"

    def __call__(self, model: ir.Model) -> int:
        graph = model.graph
        kept = [value for value in graph.inputs if not value.is_initializer()]
        removed = len(graph.inputs) - len(kept)
        if removed:
            graph.inputs.clear()
            graph.inputs.extend(kept)
            model.ir_version = max(model.ir_version, _FIRST_IR_VERSION)
        return removed
