"""Each layer its own bias."""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from roundel.passes.base import Pass
from roundel.passes.rewriting import Editor, constant, input_at, is_op


class UnshareBiases(Pass):
    """Copies a bias that several nodes read, one copy for each layer. Exact.

    The scale of a bias is that of its layer's input times that of its weight: two layers that share the
    numbers still need two scales.
    """

    name: ClassVar[str] = "unshare biases"

    def __call__(self, model: ir.Model) -> int:
        editor = Editor(model)
        count = 0
        for node in model.graph:
            if not is_op(node, "Conv", "ConvTranspose", "Gemm"):
                continue
            bias = input_at(node, 2)
            array = constant(bias)
            if bias is not None and array is not None and (len(bias.uses()) > 1 or bias.is_graph_output()):
                node.replace_input_with(2, editor.initializer(bias.name or "bias", array))
                count += 1
        return count
