"""MatMul and Gemm with constant weights as y = x W + b, whatever way they are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.algorithms.splice import splice
from roundel.passes.rewriting import (
    Editor,
    constant,
    get_float,
    get_int,
    input_at,
    is_op,
    only_reader,
    operands,
    same_rank,
)

_STORED = (np.dtype(np.float32), np.dtype(np.float64))


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """A layer that reads the last axis of its input.

    Attributes:
        node: MatMul, or Gemm with factors of 1.
        transposed: whether the stored weight is (outputs, inputs).
    """

    node: ir.Node
    transposed: bool

    @property
    def name(self) -> str:
        """What reports call it."""
        return str(self.node.name or self.node.outputs[0].name)

    @property
    def weight(self) -> NDArray[Any]:
        """(inputs, outputs), a view of what is stored now."""
        stored = constant(input_at(self.node, 1))
        assert stored is not None, "read_linear has seen it"
        return stored.T if self.transposed else stored

    @property
    def weight_name(self) -> str:
        """The initializer's name."""
        value = input_at(self.node, 1)
        return "" if value is None else str(value.name)

    def set_weight(self, editor: Editor, weight: NDArray[Any]) -> None:
        """Store another weight, (inputs, outputs), in the type of the old one."""
        stored = np.ascontiguousarray(weight.T if self.transposed else weight)
        editor.set_constant(self.node, 1, stored.astype(self.weight.dtype), "weight")

    def add_bias(self, editor: Editor, shift: NDArray[np.float64]) -> None:
        """Add a number to each output: in the bias where there is one, else in a new one."""
        slot = self._bias_slot()
        if slot is not None:
            node, index = slot
            old = constant(input_at(node, index))
            new = shift if old is None else old + shift
            editor.set_constant(node, index, new.astype(self.weight.dtype), "bias")
            return
        splice(editor, self.node.outputs[0], "Add", shift.astype(self.weight.dtype))

    def _bias_slot(self) -> tuple[ir.Node, int] | None:
        if self.node.op_type == "Gemm":
            return self.node, 2
        adding = only_reader(self.node.outputs[0])
        if adding is None or not is_op(adding, "Add"):
            return None
        for value, other in operands(adding):
            array = constant(other)
            if value is not self.node.outputs[0] or array is None or not same_rank(value, adding.outputs[0]):
                continue
            if array.size in (1, self.weight.shape[1]) and array.shape[-1:] in ((), (1,), (array.size,)):
                return adding, next(i for i, v in enumerate(adding.inputs) if v is other)
        return None


def read_linear(node: ir.Node) -> Linear | None:
    """The node as a layer, where its weight (and a Gemm's bias) are constants that can be rewritten."""
    if not is_op(node, "MatMul", "Gemm"):
        return None
    weight = constant(input_at(node, 1))
    if weight is None or weight.ndim != 2 or weight.dtype not in _STORED or not weight.size:
        return None
    if not np.isfinite(weight).all():
        return None
    if node.op_type == "MatMul":
        data = input_at(node, 0)
        deep = data is not None and data.shape is not None and len(data.shape) >= 2
        return Linear(node, transposed=False) if deep else None
    plain = get_float(node, "alpha", 1.0) == get_float(node, "beta", 1.0) == 1.0
    bias = input_at(node, 2)
    if not plain or get_int(node, "transA", 0) or (bias is not None and constant(bias) is None):
        return None
    return Linear(node, transposed=bool(get_int(node, "transB", 0)))
