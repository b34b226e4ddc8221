"""Softmax and InstanceNormalization in the bfloat16 steps that the NPU takes."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from roundel.model.graph import attribute_float, attribute_int, rank
from roundel.qdq.pairs import Names, constant

_AXES_AS_INPUT = 18  # from this opset on, also for ReduceMax and ReduceMean
_EXP = (0.21875, 0.486328125, 1.0, 1.0)  # ((a r + b) r + c) r + d ~ exp(r) on [0, ln 2), in bfloat16


class Bf16Writer:
    """Appends nodes whose results are rounded to bfloat16 after every step."""

    def __init__(self, graph: ir.Graph, names: Names, origin: ir.Node) -> None:
        self.graph, self.names, self.origin = graph, names, origin
        self._last = origin

    def number(self, value: float) -> ir.Value:
        """A float32 scalar."""
        return constant(self.graph, self.names(f"{self.origin.name}_number"), np.asarray(value, np.float32))

    def node(self, op: str, inputs: list[ir.Value], **attributes: int | float | list[int]) -> ir.Value:
        """One plain node."""
        name = self.names(f"{self.origin.name}_{op}")
        out = ir.Value(name=self.names(f"{name}_Output"), type=ir.TensorType(ir.DataType.FLOAT))
        attrs = ir.convenience.convert_attributes(attributes)
        made = ir.Node("", op, inputs, attributes=attrs, outputs=[out], name=name)
        self.graph.insert_after(self._last, made)
        self._last = made
        return out

    def reduce(self, op: str, value: ir.Value, axes: list[int]) -> ir.Value:
        """A reduction that keeps its dimensions; where the axes go depends on operator and opset."""
        if op != "ReduceSum" and self.graph.opset_imports.get("", 17) < _AXES_AS_INPUT:
            return self.node(op, [value], axes=axes, keepdims=1)
        where = constant(self.graph, self.names(f"{self.origin.name}_axes"), np.asarray(axes, np.int64))
        return self.node(op, [value, where], keepdims=1)

    def rounded(self, op: str, inputs: list[ir.Value], **attributes: int | float | list[int]) -> ir.Value:
        """One node, its result rounded to bfloat16."""
        return self.bf16(self.node(op, inputs, **attributes))

    def bf16(self, value: ir.Value) -> ir.Value:
        """Round to bfloat16 and back."""
        half = self.node("Cast", [value], to=ir.DataType.BFLOAT16.value)
        half.type = ir.TensorType(ir.DataType.BFLOAT16)
        return self.node("Cast", [half], to=ir.DataType.FLOAT.value)

    def replace(self, result: ir.Value) -> None:
        """Let the result stand for the origin's output, and remove the origin."""
        old = self.origin.outputs[0]
        name, shape = old.name, old.shape
        old.replace_all_uses_with(result, replace_graph_outputs=True)
        self.graph.remove(self.origin, safe=True)
        old.name, result.name, result.shape = None, name, shape


def softmax(graph: ir.Graph, names: Names, node: ir.Node) -> None:
    """exp(x) = 2**n p(r) with n = floor(x / ln 2), r = x - n ln 2, a cubic p; sum and quotient rounded."""
    write = Bf16Writer(graph, names, node)
    axis = attribute_int(node, "axis", -1)
    source = node.inputs[0]
    assert source is not None
    top = write.reduce("ReduceMax", source, [axis])
    x = write.rounded("Sub", [source, top])
    n = write.node("Floor", [write.rounded("Mul", [x, write.number(1 / math.log(2))])])
    r = write.rounded("Sub", [x, write.rounded("Mul", [n, write.number(math.log(2))])])
    p = write.number(_EXP[0])
    for coefficient in _EXP[1:]:
        p = write.rounded("Add", [write.rounded("Mul", [p, r]), write.number(coefficient)])
    power = write.node("Pow", [write.number(2.0), n])
    e = write.rounded("Mul", [p, power])
    total = write.bf16(write.reduce("ReduceSum", e, [axis]))
    write.replace(write.rounded("Div", [e, total]))


def instance_norm(graph: ir.Graph, names: Names, node: ir.Node) -> bool:
    """(x - mean) / sqrt(var + eps) * scale + bias with every intermediate rounded to bfloat16."""
    source, scale, bias = node.inputs[0], node.inputs[1], node.inputs[2]
    ndim = rank(source)
    if ndim is None or source is None or scale is None or bias is None:
        return False
    write = Bf16Writer(graph, names, node)
    axes = list(range(2, ndim))
    shape = constant(graph, names(f"{node.name}_shape"), np.asarray([1, -1, *[1] * len(axes)], np.int64))
    mean = write.bf16(write.reduce("ReduceMean", source, axes))
    centred = write.rounded("Sub", [source, mean])
    square = write.rounded("Mul", [centred, centred])
    variance = write.bf16(write.reduce("ReduceMean", square, axes))
    shifted = write.rounded("Add", [variance, write.number(attribute_float(node, "epsilon", 1e-5))])
    inverse = write.rounded("Reciprocal", [write.rounded("Sqrt", [shifted])])
    normal = write.rounded("Mul", [centred, inverse])
    scaled = write.rounded("Mul", [normal, write.node("Reshape", [scale, shape])])
    write.replace(write.rounded("Add", [scaled, write.node("Reshape", [bias, shape])]))
    return True
