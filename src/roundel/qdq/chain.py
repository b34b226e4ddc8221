"""Nodes in a row, each of which reads the one before it."""

from __future__ import annotations

import onnx_ir as ir

from roundel.qdq.pairs import Names


class Chain:
    """Grows from a value; nodes and tensors are named after the tensor that the chain stores.

    Args:
        value: what the first node reads.
        names: hands out free ones.
        base: the tensor's name.
        suffix: tells the chains of one tensor apart.
    """

    def __init__(self, value: ir.Value, names: Names, base: str, suffix: str = "") -> None:
        self.value, self.nodes = value, list[ir.Node]()
        self._names, self._base, self._suffix = names, base, suffix

    def add(
        self,
        op: str,
        *constants: ir.Value,
        label: str | None = None,
        domain: str = "",
        dtype: ir.DataType = ir.DataType.FLOAT,
        attributes: tuple[ir.Attr, ...] = (),
    ) -> None:
        """One more node."""
        name = f"{self._base}_{label or op}"
        out = ir.Value(
            name=self._names(f"{name}_Output{self._suffix}"),
            shape=self.value.shape,
            type=ir.TensorType(dtype),
        )
        node = ir.Node(
            domain,
            op,
            [self.value, *constants],
            attributes=attributes,
            outputs=[out],
            name=self._names(f"{name}{self._suffix}"),
        )
        self.nodes.append(node)
        self.value = out

    def end(self, name: str) -> list[ir.Node]:
        """The nodes, the last of which makes a tensor of this name."""
        self.value.name = name
        return self.nodes
