"""Dynamic quantization: 8-bit weights in the file, activations measured at run time."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from roundel.model.edit import Names, add_constant
from roundel.model.graph import attribute_float, attribute_int, constant_array, op_key
from roundel.numerics.affine import quantize, weight_params
from roundel.qdq.nodes import forget
from roundel.recipe.settings import Recipe
from roundel.types import Scheme

DYNAMIC_OPS = ("MatMul", "Gemm", "Conv")


def write_dynamic(model: ir.Model, recipe: Recipe, chosen: frozenset[str]) -> tuple[ir.Model, int]:
    """A copy whose chosen nodes compute in integers; returns it with the number of nodes changed.

    Args:
        model: the prepared float model.
        recipe: gives the weights' type.
        chosen: names of the nodes to change; those with computed weights are left alone.
    """
    result = model.clone()
    writer = _DynamicWriter(result.graph, recipe)
    changed = sum(writer.rewrite(node) for node in list(result.graph) if node.name in chosen)
    writer.drop_floats()
    result.graph.sort()
    return result, changed


class _DynamicWriter:
    def __init__(self, graph: ir.Graph, recipe: Recipe) -> None:
        self.graph, self.recipe, self.names = graph, recipe, Names(graph)
        self._activations: dict[ir.Value, tuple[ir.Value, ir.Value, ir.Value]] = {}
        self._weights: dict[tuple[ir.Value, bool], tuple[ir.Value, ir.Value, ir.Value]] = {}
        self._reshaped: set[ir.Value] = set()

    def rewrite(self, node: ir.Node) -> bool:
        """Replace one node by its integer form, if its weight is a constant."""
        if op_key(node) not in DYNAMIC_OPS or not self._supported(node):
            return False
        data, weight = node.inputs[0], node.inputs[1]
        assert data is not None
        assert weight is not None
        codes, scale, zero = self._activation(data)
        transposed = bool(node.op_type == "Gemm" and attribute_int(node, "transB", 0))
        w_codes, w_scale, w_zero = self._weight(weight, transposed)
        integer = "ConvInteger" if node.op_type == "Conv" else "MatMulInteger"
        attributes = [a for a in node.attributes.values() if node.op_type == "Conv"]
        product = self._node(node, integer, [codes, w_codes, zero, w_zero], attributes)
        real = self._node(node, "Cast", [product], [ir.AttrInt64("to", ir.DataType.FLOAT.value)])
        scales = self._node(node, "Mul", [scale, w_scale])
        out = self._node(node, "Mul", [real, scales])
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        if bias is not None:
            out = self._node(node, "Add", [out, self._shaped_bias(node, bias)])
        self._take_over(node, out)
        return True

    def drop_floats(self) -> None:
        """Remove the float weights that integers have replaced everywhere."""
        forget(self.graph, *{value for value, _ in self._weights}, *self._reshaped)

    def _supported(self, node: ir.Node) -> bool:
        weight = constant_array(node.inputs[1])
        if weight is None or weight.dtype != np.float32 or weight.size == 0:
            return False
        if node.op_type == "Gemm":
            plain = attribute_float(node, "alpha", 1.0) == attribute_float(node, "beta", 1.0) == 1.0
            return plain and not attribute_int(node, "transA", 0)
        return weight.ndim == 4 if node.op_type == "Conv" else weight.ndim >= 2

    def _activation(self, value: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """DynamicQuantizeLinear, once for each tensor."""
        if value not in self._activations:
            outs = [
                ir.Value(name=self.names(f"{value.name}_{part}")) for part in ("quantized", "scale", "zero")
            ]
            name = self.names(f"{value.name}_QuantizeLinear")
            node = ir.Node("", "DynamicQuantizeLinear", [value], outputs=outs, name=name)
            self.graph.append(node)
            self._activations[value] = (outs[0], outs[1], outs[2])
        return self._activations[value]

    def _weight(self, value: ir.Value, transposed: bool) -> tuple[ir.Value, ir.Value, ir.Value]:
        key = (value, transposed)
        if key not in self._weights:
            array = constant_array(value)
            assert array is not None
            scheme = self.recipe.weights.scheme
            assert isinstance(scheme, Scheme)
            params = weight_params(array, scheme)
            codes = quantize(array, params, narrow=self.recipe.weights.symmetric)
            codes = np.ascontiguousarray(codes.T) if transposed else codes
            parts = (("quantized", codes), ("scale", params.scale), ("zero_point", params.zero_point))
            made = [
                add_constant(self.graph, self.names(f"{value.name}_{part}"), content)
                for part, content in parts
            ]
            self._weights[key] = (made[0], made[1], made[2])
        return self._weights[key]

    def _shaped_bias(self, node: ir.Node, bias: ir.Value) -> ir.Value:
        array = constant_array(bias)
        if node.op_type != "Conv" or array is None:
            return bias
        self._reshaped.add(bias)
        return add_constant(self.graph, self.names(f"{bias.name}_shaped"), array.reshape(1, -1, 1, 1))

    def _node(
        self, origin: ir.Node, op: str, inputs: list[ir.Value], attributes: list[ir.Attr] | None = None
    ) -> ir.Value:
        name = self.names(f"{origin.name}_{op}")
        out = ir.Value(name=self.names(f"{name}_Output"))
        self.graph.append(ir.Node("", op, inputs, attributes=attributes or [], outputs=[out], name=name))
        return out

    def _take_over(self, node: ir.Node, value: ir.Value) -> None:
        old = node.outputs[0]
        name = old.name
        old.replace_all_uses_with(value, replace_graph_outputs=True)
        value.shape, value.type = old.shape, old.type
        self.graph.remove(node, safe=True)
        old.name = None
        value.name = name
