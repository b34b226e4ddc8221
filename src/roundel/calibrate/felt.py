"""What is felt of a tensor's error behind the function that alone reads it.

A Sigmoid does not see whether its input is -20 or -140, and x * Sigmoid(x) hardly does; a range that makes
room for such values takes the codes from those that count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import onnx_ir as ir

from roundel.model.graph import attribute_float, op_key
from roundel.numerics.scale_search import Felt
from roundel.types import Doubles


def felt_functions(graph: ir.Graph) -> dict[str, Felt]:
    """For each tensor that only such a function reads, the function."""
    found = {}
    for node in graph:
        function = _FUNCTIONS.get(op_key(node))
        value = node.inputs[0] if function is not None else None
        if function is None or value is None or value.is_graph_output():
            continue
        others = [use.node for use in value.uses() if use.node is not node]
        applied = function(node)
        if not others:
            found[str(value.name)] = applied
        elif len(others) == 1 and _gates(node, others[0], value):
            found[str(value.name)] = partial(_gated, applied)
    return found


def _gates(node: ir.Node, product: ir.Node, value: ir.Value) -> bool:
    """Whether the product of the value and what the node makes of it is all that is seen of either."""
    made = node.outputs[0]
    alone = not made.is_graph_output() and [use.node for use in made.uses()] == [product]
    return alone and op_key(product) == "Mul" and set(product.inputs) == {value, made}


def _gated(gate: Felt, x: Doubles) -> Doubles:
    return x * gate(x)


def _sigmoid(x: Doubles) -> Doubles:
    return np.asarray(0.5 + 0.5 * np.tanh(0.5 * x))


def _hard_sigmoid(x: Doubles, alpha: float, beta: float) -> Doubles:
    return np.clip(alpha * x + beta, 0.0, 1.0)


def _hard_swish(x: Doubles) -> Doubles:
    return x * _hard_sigmoid(x, 1 / 6, 0.5)


def _gelu(x: Doubles) -> Doubles:
    return np.asarray(0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3))))


def _elu(x: Doubles, alpha: float) -> Doubles:
    return np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0.0)))


_FUNCTIONS: dict[str, Callable[[ir.Node], Felt]] = {
    "Sigmoid": lambda node: _sigmoid,
    "Tanh": lambda node: np.tanh,
    "HardSwish": lambda node: _hard_swish,
    "Gelu": lambda node: _gelu,
    "HardSigmoid": lambda node: partial(
        _hard_sigmoid, alpha=attribute_float(node, "alpha", 0.2), beta=attribute_float(node, "beta", 0.5)
    ),
    "Elu": lambda node: partial(_elu, alpha=attribute_float(node, "alpha", 1.0)),
}
