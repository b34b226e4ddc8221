"""HardSwish in the two steps that quantizers know."""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from roundel.passes.base import Pass
from roundel.passes.rewriting import Editor, input_at, is_op


class DecomposeHardSwish(Pass):
    """Replaces HardSwish(x) by x * HardSigmoid(x, 1/6, 1/2), its definition. Exact."""

    name: ClassVar[str] = "decompose hard swish"

    def __call__(self, model: ir.Model) -> int:
        editor = Editor(model)
        return sum(_decompose(editor, node) for node in list(model.graph) if is_op(node, "HardSwish"))


def _decompose(editor: Editor, node: ir.Node) -> bool:
    source = input_at(node, 0)
    if source is None:
        return False
    base = node.name or node.outputs[0].name or "HardSwish"
    gate = editor.insert(node, "HardSigmoid", [source], {"alpha": 1 / 6, "beta": 0.5}, f"{base}_gate")
    gate.shape, gate.type = node.outputs[0].shape, node.outputs[0].type
    editor.replace(node, "Mul", [source, gate], {})
    return True
