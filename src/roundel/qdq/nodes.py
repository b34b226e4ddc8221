"""Q and DQ nodes: their names, domains, constants, and chains of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from roundel.errors import RecipeError
from roundel.model.edit import Names, add_constant
from roundel.recipe.settings import Recipe
from roundel.targets.npu import NATIVE_16_BIT_OPSET
from roundel.types import Array, QParams, QType

MICROSOFT = "com.microsoft"
QUARK = "com.amd.quark"

CODES = "_quantized"  # of a constant's codes
BEFORE = "_QuantizeLinear_Input"  # of a graph output's tensor, which its pair's output took the name of
AFTER = "_DequantizeLinear_Output"
_APPENDED = (BEFORE, AFTER, "_DequantizeLinear", "_QuantizeInput", "_dequantized")


def bare_name(name: str) -> str:
    """A tensor's name without what quantizers append."""
    for suffix in _APPENDED:
        if name.endswith(suffix) and name != suffix:
            return bare_name(name.removesuffix(suffix))
    return name


@dataclass(frozen=True, slots=True)
class Dialect:
    """Which domain carries the Q/DQ nodes."""

    wanted: str
    opset: int

    @staticmethod
    def of(recipe: Recipe, opset: int) -> Dialect:
        """The recipe's choice, checked against the opset."""
        sixteen = {recipe.activations.type, recipe.weights.type} & {"int16", "uint16"}
        if recipe.placement.domain == "ai.onnx" and sixteen and opset < NATIVE_16_BIT_OPSET:
            raise RecipeError(
                "The standard QuantizeLinear has no 16-bit types at this opset.",
                where="placement.domain: ai.onnx",
                observed=f"opset {opset} and {sorted(sixteen)[0]}",
                expected=f"opset {NATIVE_16_BIT_OPSET}",
                hint="Set output.opset: 21, or placement.domain: com.microsoft.",
            )
        return Dialect(recipe.placement.domain, opset)

    def domain(self, qtype: QType) -> str:
        """The domain for one tensor's nodes."""
        if self.wanted == MICROSOFT:
            return MICROSOFT
        wide = qtype in (QType.INT16, QType.UINT16) and self.opset < NATIVE_16_BIT_OPSET
        return MICROSOFT if wide else ""


def forget(graph: ir.Graph, *values: ir.Value | None) -> None:
    """Drop initializers that nothing reads any more."""
    for value in values:
        if value is not None and not value.uses() and not value.is_graph_output():
            graph.initializers.pop(str(value.name), None)


def insert_behind(graph: ir.Graph, value: ir.Value, nodes: list[ir.Node]) -> None:
    """Put nodes right behind the one that makes a value, or at the start for one that no node makes."""
    producer = value.producer()
    if producer is not None:
        graph.insert_after(producer, nodes)
    else:
        graph.insert_before(graph[0], nodes)


def stand_for(graph: ir.Graph, value: ir.Value, source: ir.Value) -> None:
    """Let `source` take the place of `value` everywhere; graph outputs keep their names."""
    for use in list(value.uses()):
        use.node.replace_input_with(use.idx, source)
    for position in [i for i, out in enumerate(graph.outputs) if out is value]:
        name, value.name = value.name, None
        if source.is_graph_output() or source.producer() is None:
            copy = ir.Value(name=name, shape=source.shape or value.shape, type=source.type or value.type)
            graph.append(ir.Node("", "Identity", [source], outputs=[copy], name=f"{name}_Identity"))
            graph.outputs[position] = copy
        else:
            source.name = name
            source.shape, source.type = source.shape or value.shape, source.type or value.type
            graph.outputs[position] = source


def replace_node(graph: ir.Graph, node: ir.Node, result: ir.Value) -> None:
    """Let a new value stand for a node's one output, under its name, and remove the node."""
    old = node.outputs[0]
    old.replace_all_uses_with(result, replace_graph_outputs=True)
    result.shape, result.type = old.shape, old.type or result.type
    graph.remove(node, safe=True)
    name, old.name = old.name, None
    result.name = name


def add_constants(graph: ir.Graph, names: Names, base: str, **parts: Array) -> list[ir.Value]:
    """New initializers, named after `base` and their part."""
    return [add_constant(graph, names(f"{base}_{part}"), array) for part, array in parts.items()]


Ends = tuple[ir.Value, ir.Value]
"""Scale and zero point."""


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
        attributes: Sequence[ir.Attr] = (),
    ) -> None:
        """One more node."""
        name, inputs = f"{self._base}_{label or op}", [self.value, *constants]
        free = self._names(f"{name}_Output{self._suffix}")
        self.value = ir.Value(name=free, shape=self.value.shape, type=ir.TensorType(dtype))
        free = self._names(f"{name}{self._suffix}")
        self.nodes.append(ir.Node(domain, op, inputs, attributes=attributes, outputs=[self.value], name=free))

    def pair(self, domain: str, ends: Ends, params: QParams) -> None:
        """To codes and back."""
        dtype = ir.DataType.from_numpy(params.qtype.dtype)
        self.add("QuantizeLinear", *ends, domain=domain, dtype=dtype, attributes=_axis(params))
        self.dequantize(domain, ends, params)

    def dequantize(self, domain: str, ends: Ends, params: QParams) -> None:
        """Codes in, float out."""
        self.add("DequantizeLinear", *ends, domain=domain, attributes=_axis(params))

    def end(self, name: str) -> list[ir.Node]:
        """The nodes, the last of which makes a tensor of this name."""
        self.value.name = name
        return self.nodes


def _axis(params: QParams) -> list[ir.Attr]:
    return [] if params.axis is None else [ir.AttrInt64("axis", params.axis)]
