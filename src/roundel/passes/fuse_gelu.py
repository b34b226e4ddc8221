"""Gelu as one node."""

from __future__ import annotations

import math
from typing import ClassVar

import onnx_ir as ir

from roundel.passes.base import Pass
from roundel.passes.rewriting import (
    Editor,
    input_at,
    is_op,
    is_private,
    only_reader,
    operands,
    producer,
    same_rank,
    scalar,
    with_number,
)

_SINCE = 20

# How far a constant may lie from its ideal; exporters round to the type of the tensor.
_CLOSE = {ir.DataType.FLOAT: 1e-6, ir.DataType.DOUBLE: 1e-12, ir.DataType.FLOAT16: 1e-3}


class FuseGelu(Pass):
    """Fuses `0.5 * x * (1 + erf(x / sqrt(2)))`, in any order of its factors, into Gelu.

    Needs opset 20, where the operator exists. Tolerance: rounding of the product, about 1e-6.
    """

    name: ClassVar[str] = "fuse gelu"
    reads_shapes: ClassVar[bool] = True

    def __call__(self, model: ir.Model) -> int:
        editor = Editor(model)
        if editor.opset < _SINCE:
            return 0
        # A fusion removes nodes further on, hence the snapshot.
        nodes = [node for node in model.graph if is_op(node, "Erf")]
        return sum(_fuse(editor, node) for node in nodes)


def _fuse(editor: Editor, erf: ir.Node) -> bool:
    inner = _scaled_input(erf.inputs[0])
    add = only_reader(erf.outputs[0])
    one = with_number(add, "Add")
    if inner is None or add is None or one is None or one[1] != 1.0:
        return False
    source, nodes = inner[0], {inner[1], erf, add}
    product = _product(source, add)
    if product is None:
        return False
    last, nodes = product[0], nodes | product[1]
    if not same_rank(source, last.outputs[0]) or not is_private(nodes, last):
        return False
    editor.replace(last, "Gelu", [source], {})
    editor.drop_all(nodes - {last})
    return True


def _scaled_input(value: ir.Value | None) -> tuple[ir.Value, ir.Node] | None:
    """Match `x / sqrt(2)` or `x * sqrt(1/2)`: x and the node."""
    node = producer(value, "Div", "Mul")
    if node is None:
        return None
    if node.op_type == "Mul":
        pair = with_number(node, "Mul")
        found = None if pair is None else (pair[0], 1 / pair[1] if pair[1] else math.inf)
    else:
        source, divisor = input_at(node, 0), scalar(input_at(node, 1))
        found = None if source is None or divisor is None else (source, divisor)
    if found is None:
        return None
    close = _CLOSE.get(found[0].dtype or ir.DataType.UNDEFINED, 0.0)
    return (found[0], node) if math.isclose(found[1], math.sqrt(2), rel_tol=close) else None


def _product(source: ir.Value, add: ir.Node) -> tuple[ir.Node, set[ir.Node]] | None:
    """The rest of the product, whose factors are x, 0.5 and the output of `add`."""
    first = only_reader(add.outputs[0])
    if first is None or not is_op(first, "Mul"):
        return None
    other = next((b for a, b in operands(first) if a is add.outputs[0]), None)
    half = with_number(producer(other, "Mul"), "Mul")
    if half is not None and half[0] is source and half[1] == 0.5:
        maker = producer(other, "Mul")
        assert maker is not None, "just matched"
        return first, {first, maker}
    second = only_reader(first.outputs[0])
    if second is None or not is_op(second, "Mul"):
        return None
    rest = next((b for a, b in operands(second) if a is first.outputs[0]), None)
    if (other is source and scalar(rest) == 0.5) or (rest is source and scalar(other) == 0.5):
        return second, {first, second}
    return None
