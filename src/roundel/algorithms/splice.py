"""Put one node with a constant behind a tensor, for some or all of its readers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from roundel.passes.rewriting import Editor

Readers = Iterable[tuple[ir.Node, int]]


def splice(
    editor: Editor,
    value: ir.Value,
    op_type: str,
    constant: NDArray[Any],
    *,
    readers: Readers | None = None,
    outputs: bool = True,
) -> ir.Value:
    """Let readers see `op_type(value, constant)` instead of the value; the shape must stay.

    Args:
        editor: of the model.
        value: any tensor of the main graph.
        op_type: Add, Mul or MatMul.
        constant: its second operand.
        readers: (node, input index) pairs; None for all there are.
        outputs: whether a graph output moves, too; its name moves with it.
    """
    chosen = [(use.node, use.idx) for use in value.uses()] if readers is None else list(readers)
    base = f"{value.name}_{op_type}"
    operand = editor.initializer(f"{base}_constant", constant)
    node = ir.node(op_type, [value, operand], name=editor.fresh(base))
    made, maker = node.outputs[0], value.producer()
    made.shape, made.type = value.shape, value.type
    made.name = editor.fresh(f"{base}_output")
    if maker is None:
        editor.graph.insert_before(editor.graph[0], node)
    else:
        maker.append(node)
    for reader, index in chosen:
        reader.replace_input_with(index, made)
    if outputs and value.is_graph_output():
        _hand_over(editor, value, made)
    return made


def _hand_over(editor: Editor, old: ir.Value, new: ir.Value) -> None:
    for index, output in enumerate(editor.graph.outputs):
        if output is old:
            editor.graph.outputs[index] = new
    name, old.name = old.name, editor.fresh(f"{old.name}_inner")
    new.name = name
