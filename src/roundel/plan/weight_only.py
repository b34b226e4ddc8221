"""The plan of mode weight_only: which matrices are stored in few bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.model.graph import (
    attribute_float,
    attribute_int,
    constant_array,
    is_constant,
    is_float32,
    iter_values,
)
from roundel.plan.select import choose_nodes, operator_rules
from roundel.plan.types import NodePlan, Observed, QuantPlan, Role, TensorPlan
from roundel.recipe.settings import Recipe
from roundel.targets.operators import operator_set


@dataclass(frozen=True, slots=True)
class WeightLayer:
    """A MatMul or Gemm whose weight is stored in few bits.

    Attributes:
        node: its name.
        op: its operator.
        data, weight, output: the tensors around it.
        transposed: the weight lies as (outputs, inputs), as Gemm's transB has it.
    """

    node: str
    op: str
    data: str
    weight: str
    output: str
    transposed: bool

    @property
    def key(self) -> tuple[str, bool]:
        """Equal for layers that read one matrix in one way."""
        return self.weight, self.transposed

    def matrix(self, weight: NDArray[Any]) -> NDArray[Any]:
        """The weight as (outputs, inputs)."""
        return weight if self.transposed else weight.T

    def tensor(self, matrix: NDArray[Any]) -> NDArray[Any]:
        """A matrix (outputs, inputs) as the weight lies."""
        return matrix if self.transposed else np.ascontiguousarray(matrix.T)


def plan_weights(model: ir.Model, recipe: Recipe) -> QuantPlan:
    """Decide for every matrix whether it is stored in few bits, and why. Reads the model only."""
    graph = model.graph
    matrices = operator_set("matmul")
    rules = {op: rule for op, rule in operator_rules(graph, recipe).items() if op in matrices}
    nodes = choose_nodes(model, recipe, rules)
    for node in graph:
        verdict = nodes[str(node.name)]
        reason = _objection(node) if verdict.quantized else None
        if reason is not None:
            nodes[verdict.name] = replace(verdict, quantized=False, reason=reason)
    tensors = {}
    for layer in weight_layers(graph, nodes):
        why = f"constant operand of {layer.op}"
        tensors[layer.weight] = TensorPlan(
            layer.weight, Role.WEIGHT, recipe.weight_only.scheme, Observed(), layer.node, why
        )
    kept = {
        str(v.name): "mode weight_only: activations stay float"
        for v in iter_values(graph)
        if is_float32(v) and not is_constant(v)
    }
    return QuantPlan(tensors, kept, nodes)


def weight_layers(graph: ir.Graph, nodes: Mapping[str, NodePlan]) -> tuple[WeightLayer, ...]:
    """The chosen layers, in graph order."""
    found = []
    for node in graph:
        verdict = nodes.get(str(node.name))
        if verdict is None or not verdict.quantized:
            continue
        data, weight = node.inputs[0], node.inputs[1]
        assert data is not None
        assert weight is not None
        tensors = (str(data.name), str(weight.name), str(node.outputs[0].name))
        turned = node.op_type == "Gemm" and bool(attribute_int(node, "transB", 0))
        found.append(WeightLayer(str(node.name), node.op_type, *tensors, transposed=turned))
    return tuple(found)


def _objection(node: ir.Node) -> str | None:
    weight = constant_array(node.inputs[1])
    if weight is None:
        return f"{node.op_type} of two computed tensors"
    if is_constant(node.inputs[0]):
        return "both operands are constants"
    if weight.dtype != np.float32 or weight.ndim != 2 or weight.size == 0:
        return f"its weight is {weight.dtype} {list(weight.shape)}, not a float32 matrix"
    if node.op_type == "Gemm" and attribute_int(node, "transA", 0):
        return "Gemm that transposes its input"
    if node.op_type == "Gemm" and attribute_float(node, "alpha", 1.0) != 1.0:
        return "Gemm that scales its product (alpha)"
    if node.op_type == "Gemm" and attribute_float(node, "beta", 1.0) != 1.0:
        return "Gemm that scales its bias (beta)"
    return None
