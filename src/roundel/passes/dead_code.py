"""What no output depends on goes."""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from roundel.passes.base import Pass
from roundel.passes.rewriting import Editor


class DeadCode(Pass):
    """Removes nodes, initializers and functions that no graph output depends on. Exact."""

    name: ClassVar[str] = "dead code"

    def __call__(self, model: ir.Model) -> int:
        editor = Editor(model)
        count = 0
        # Readers come after what they read, so one walk from the end meets every reader first.
        for node in reversed(model.graph):
            if not any(value.uses() or value.is_graph_output() for value in node.outputs):
                editor.drop(node)
                count += 1
        return count + _remove_initializers(model.graph) + _remove_functions(model)


def _remove_initializers(graph: ir.Graph) -> int:
    unused = [
        name
        for name, value in graph.initializers.items()
        if not (value.uses() or value.is_graph_output() or value.is_graph_input())
    ]
    for name in unused:
        del graph.initializers[name]
    return len(unused)


def _remove_functions(model: ir.Model) -> int:
    pending = {node.op_identifier() for node in model.graph.all_nodes()} & set(model.functions)
    called = set(pending)
    while pending:
        body = model.functions[pending.pop()]
        inner = {node.op_identifier() for node in body.all_nodes()} & set(model.functions)
        pending |= inner - called
        called |= inner
    unused = [key for key in model.functions if key not in called]
    for key in unused:
        del model.functions[key]
    return len(unused)
