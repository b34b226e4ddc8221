"""Make a Q/DQ model compute what the NPU computes, where its arithmetic differs from ONNX's."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from roundel.model.edit import Names, add_constant
from roundel.model.graph import (
    any_reduced_axes,
    attribute_float,
    attribute_int,
    attribute_ints,
    constant_array,
    dims,
    rank,
)
from roundel.numerics.affine import HARD_SIGMOID_GAIN, pool_gain, reciprocal_gain
from roundel.plan.adjust import becomes_hard_sigmoid, saturates, upper_bound
from roundel.qdq.nodes import BEFORE, forget, replace_node
from roundel.recipe.settings import Npu
from roundel.state import State
from roundel.targets.operators import AVERAGE_POOLS


def simulate(model: ir.Model, state: State, npu: Npu) -> dict[str, int]:
    """Rewrite quantized nodes in place; returns how many of each kind."""
    work = _Simulation(model.graph, state, npu)
    for node in list(model.graph):
        verdict = state.plan.nodes.get(str(node.name))
        if verdict is not None and verdict.quantized:
            work.rewrite(node)
    return work.counts


class _Simulation:
    def __init__(self, graph: ir.Graph, state: State, npu: Npu) -> None:
        self.graph, self.state, self.npu, self.names = graph, state, npu, Names(graph)
        self.counts: dict[str, int] = {}

    def rewrite(self, node: ir.Node) -> None:
        """Apply whatever concerns this operator."""
        npu, op = self.npu, node.op_type
        if op == "LeakyRelu" and npu.leaky_relu:
            slope = round(256 * attribute_float(node, "alpha", 0.01)) / 256
            node.attributes["alpha"] = ir.AttrFloat32("alpha", slope)
            self._count("LeakyRelu slope to n/256")
        elif becomes_hard_sigmoid(node, self.state.plan, npu, _original(node)):
            self._to_hard_sigmoid(node)
        elif op == "HardSigmoid" and npu.hard_sigmoid:
            self._gain(node, HARD_SIGMOID_GAIN)
        elif op in AVERAGE_POOLS and npu.average_pool:
            side = _kernel(node)
            self._gain(node, 1.0 if side is None else pool_gain(side, side))
        elif op == "ReduceMean" and npu.reduce_mean:
            self._gain(node, reciprocal_gain(_reduced(node) or 1))
        elif op == "Softmax" and npu.softmax:
            softmax(self.graph, self.names, node)
            self._count("Softmax in bfloat16")
        elif op == "InstanceNormalization" and npu.instance_norm:
            if instance_norm(self.graph, self.names, node):
                self._count("InstanceNormalization in bfloat16")
        elif op == "Clip":
            self._clip(node)

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def _to_hard_sigmoid(self, node: ir.Node) -> None:
        node.op_type = "HardSigmoid"
        node.attributes["alpha"] = ir.AttrFloat32("alpha", 1 / 6)
        node.attributes["beta"] = ir.AttrFloat32("beta", 0.5)
        self._count("Sigmoid to HardSigmoid")
        if self.npu.hard_sigmoid:
            self._gain(node, HARD_SIGMOID_GAIN)

    def _gain(self, node: ir.Node, gain: float) -> None:
        """A Mul between the node and whoever reads it; 1 needs none."""
        if gain == 1.0 or node.outputs[0].is_graph_output():
            return
        out = node.outputs[0]
        uses = list(out.uses())
        factor = add_constant(self.graph, self.names(f"{node.name}_gain"), np.asarray(gain, np.float32))
        # The product is the tensor that the plan speaks of: it keeps the name.
        result = ir.Value(name=out.name, shape=out.shape, type=out.type)
        out.name = self.names(f"{out.name}_without_gain")
        name = self.names(f"{node.name}_gain_Mul")
        multiply = ir.Node("", "Mul", [out, factor], outputs=[result], name=name)
        for use in uses:
            use.node.replace_input_with(use.idx, result)
        self.graph.insert_after(node, multiply)
        self._count(f"{node.op_type} gain")

    def _clip(self, node: ir.Node) -> None:
        bound, params = upper_bound(node), self.state.params.get(_original(node))
        wanted = self.npu.clip_to_relu and not (self.npu.limits and _behind_depthwise(node))
        # The body of an If or Loop would read the float value, where nothing saturates.
        wanted = wanted and all(use.node.op_type == "QuantizeLinear" for use in node.outputs[0].uses())
        if wanted and bound is not None and params is not None and saturates(params, bound):
            bounds = node.inputs[1:]
            node.op_type = "Relu"
            node.resize_inputs(1)
            forget(self.graph, *bounds)
            self._count("Clip to Relu")
        elif self.npu.clip:
            self._whole_bounds(node)

    def _whole_bounds(self, node: ir.Node) -> None:
        for index in range(1, len(node.inputs)):
            value = node.inputs[index]
            array = constant_array(value)
            if array is not None:
                whole = np.clip(np.rint(array), -128, 127).astype(array.dtype)
                name = self.names(f"{node.name}_bound")
                node.replace_input_with(index, add_constant(self.graph, name, whole))
                forget(self.graph, value)
        self._count("Clip bounds to whole numbers")


def _behind_depthwise(node: ir.Node) -> bool:
    """Depthwise Conv and ReLU6 are one operation of the 8-bit engine; with Relu they would leave it."""
    source = node.inputs[0]
    maker = source.producer() if source is not None else None
    return maker is not None and maker.op_type == "Conv" and attribute_int(maker, "group", 1) > 1


def _original(node: ir.Node) -> str:
    """The tensor's name in the plan: a graph output was renamed when its pair was written."""
    return str(node.outputs[0].name).removesuffix(BEFORE)


def _kernel(node: ir.Node) -> int | None:
    """The side of the square that a pool averages.

    The hardware's factors are for square kernels; others are computed without error of their own.
    """
    shape: Sequence[int | None] = attribute_ints(node, "kernel_shape") or ()
    if node.op_type == "GlobalAveragePool":
        shape = (dims(node.inputs[0]) or ())[2:]
    return shape[0] if len(shape) == 2 and shape[0] == shape[1] else None


def _reduced(node: ir.Node) -> int | None:
    shape = dims(node.inputs[0])
    if shape is None:
        return None
    sizes = [shape[axis] for axis in any_reduced_axes(node, len(shape)) or range(len(shape))]
    known = [size for size in sizes if size is not None]
    return math.prod(known) if len(known) == len(sizes) else None


_AXES_AS_INPUT = 18  # from this opset on, also for ReduceMax and ReduceMean
_EXP = (0.21875, 0.486328125, 1.0, 1.0)  # ((a r + b) r + c) r + d ~ exp(r) on [0, ln 2), in bfloat16


class Bf16Writer:
    """Appends nodes whose results are rounded to bfloat16 after every step."""

    def __init__(self, graph: ir.Graph, names: Names, origin: ir.Node) -> None:
        self.graph, self.names, self.origin = graph, names, origin
        self._last = origin

    def number(self, value: float) -> ir.Value:
        """A float32 scalar."""
        name = self.names(f"{self.origin.name}_number")
        return add_constant(self.graph, name, np.asarray(value, np.float32))

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
        where = add_constant(self.graph, self.names(f"{self.origin.name}_axes"), np.asarray(axes, np.int64))
        return self.node(op, [value, where], keepdims=1)

    def rounded(self, op: str, inputs: list[ir.Value], **attributes: int | float | list[int]) -> ir.Value:
        """One node, its result rounded to bfloat16."""
        return self.bf16(self.node(op, inputs, **attributes))

    def bf16(self, value: ir.Value) -> ir.Value:
        """Round to bfloat16 and back."""
        half = self.node("Cast", [value], to=ir.DataType.BFLOAT16.value)
        half.type = ir.TensorType(ir.DataType.BFLOAT16)
        return self.node("Cast", [half], to=ir.DataType.FLOAT.value)


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
    replace_node(graph, node, write.rounded("Div", [e, total]))


def instance_norm(graph: ir.Graph, names: Names, node: ir.Node) -> bool:
    """(x - mean) / sqrt(var + eps) * scale + bias with every intermediate rounded to bfloat16."""
    source, scale, bias = node.inputs[0], node.inputs[1], node.inputs[2]
    ndim = rank(source)
    if ndim is None or source is None or scale is None or bias is None:
        return False
    write = Bf16Writer(graph, names, node)
    axes = list(range(2, ndim))
    shape = add_constant(graph, names(f"{node.name}_shape"), np.asarray([1, -1, *[1] * len(axes)], np.int64))
    mean = write.bf16(write.reduce("ReduceMean", source, axes))
    centred = write.rounded("Sub", [source, mean])
    square = write.rounded("Mul", [centred, centred])
    variance = write.bf16(write.reduce("ReduceMean", square, axes))
    shifted = write.rounded("Add", [variance, write.number(attribute_float(node, "epsilon", 1e-5))])
    inverse = write.rounded("Reciprocal", [write.rounded("Sqrt", [shifted])])
    normal = write.rounded("Mul", [centred, inverse])
    scaled = write.rounded("Mul", [normal, write.node("Reshape", [scale, shape])])
    replace_node(graph, node, write.rounded("Add", [scaled, write.node("Reshape", [bias, shape])]))
    return True
