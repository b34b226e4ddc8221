"""Q and DQ nodes, their names, domains and constants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from roundel.errors import RecipeError
from roundel.model.graph import iter_values
from roundel.recipe.settings import Recipe
from roundel.types import QParams, QType

MICROSOFT = "com.microsoft"
QUARK = "com.amd.quark"
_NATIVE_16_BIT_OPSET = 21


@dataclass(frozen=True, slots=True)
class Dialect:
    """Which domain carries the Q/DQ nodes."""

    wanted: str
    opset: int

    @staticmethod
    def of(recipe: Recipe, opset: int) -> Dialect:
        """The recipe's choice, checked against the opset."""
        sixteen = {recipe.activations.type, recipe.weights.type} & {"int16", "uint16"}
        if recipe.placement.domain == "ai.onnx" and sixteen and opset < _NATIVE_16_BIT_OPSET:
            raise RecipeError(
                "The standard QuantizeLinear has no 16-bit types at this opset.",
                where="placement.domain: ai.onnx",
                observed=f"opset {opset} and {sorted(sixteen)[0]}",
                expected=f"opset {_NATIVE_16_BIT_OPSET}",
                hint="Set output.opset: 21, or placement.domain: com.microsoft.",
            )
        return Dialect(recipe.placement.domain, opset)

    def domain(self, qtype: QType) -> str:
        """The domain for one tensor's nodes."""
        if self.wanted == MICROSOFT:
            return MICROSOFT
        wide = qtype in (QType.INT16, QType.UINT16) and self.opset < _NATIVE_16_BIT_OPSET
        return MICROSOFT if wide else ""


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


def constant(graph: ir.Graph, name: str, array: NDArray[Any]) -> ir.Value:
    """A new initializer."""
    tensor = ir.tensor(array, name=name)
    type_ = ir.TensorType(tensor.dtype)
    value = ir.Value(name=name, shape=ir.Shape(array.shape), type=type_, const_value=tensor)
    graph.register_initializer(value)
    return value


def quantize_node(
    domain: str,
    source: ir.Value,
    constants: tuple[ir.Value, ir.Value],
    names: tuple[str, str],
    params: QParams,
) -> ir.Node:
    """Float in, codes out. `names` are those of the node and of its output."""
    type_ = ir.TensorType(ir.DataType.from_numpy(params.qtype.dtype))
    out = ir.Value(name=names[1], shape=source.shape, type=type_)
    return ir.Node(
        domain,
        "QuantizeLinear",
        [source, *constants],
        attributes=_axis(params),
        outputs=[out],
        name=names[0],
    )


def dequantize_node(
    domain: str,
    codes: ir.Value,
    constants: tuple[ir.Value, ir.Value],
    names: tuple[str, str],
    params: QParams,
) -> ir.Node:
    """Codes in, float out. `names` are those of the node and of its output."""
    out = ir.Value(name=names[1], shape=codes.shape, type=ir.TensorType(ir.DataType.FLOAT))
    return ir.Node(
        domain,
        "DequantizeLinear",
        [codes, *constants],
        attributes=_axis(params),
        outputs=[out],
        name=names[0],
    )


def _axis(params: QParams) -> list[ir.Attr]:
    return [] if params.axis is None else [ir.AttrInt64("axis", params.axis)]


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
