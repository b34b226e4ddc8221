"""Each layer its own weights."""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from roundel.passes.base import Pass
from roundel.passes.rewriting import Editor, constant, input_at, is_op


class UnshareWeights(Pass):
    """Copies a weight that several nodes read, one copy for each layer. Exact.

    The NPU's shift limits tie a weight's scale to its layer's input and output: two layers cannot always
    agree on one.
    """

    name: ClassVar[str] = "unshare weights"

    def __call__(self, model: ir.Model) -> int:
        editor = Editor(model)
        count = 0
        for node in model.graph:
            if not is_op(node, "Conv", "ConvTranspose", "Gemm"):
                continue
            weight = input_at(node, 1)
            array = constant(weight)
            if (
                weight is not None
                and array is not None
                and (len(weight.uses()) > 1 or weight.is_graph_output())
            ):
                node.replace_input_with(1, editor.initializer(weight.name or "weight", array))
                count += 1
        return count
