"""How much each channel of a tensor counts at the model's outputs, from the weights alone.

One walk from the outputs back: a layer passes the importance of its outputs on to its inputs by the squares
of its weights, as independent errors would add up. No gradient is computed; what a nonlinearity does to an
error is taken to be the same for all channels of a tensor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.model.graph import attribute_int, constant_array, static_shape
from roundel.types import Doubles

# Operators that leave channels where they are.
_SAME = frozenset(
    name
    for line in (
        "Relu Clip LeakyRelu PRelu HardSwish HardSigmoid Sigmoid Tanh Elu Selu Softplus Erf Gelu",
        "Identity Dropout MaxPool AveragePool GlobalAveragePool GlobalMaxPool BatchNormalization",
        "InstanceNormalization Pad Resize Add Sub Mul Div Max Min Sum ReduceMean Flatten Squeeze",
    )
    for name in line.split()
)


def importance(graph: ir.Graph) -> dict[str, Doubles]:
    """Importance of the channels of every tensor that it is known for; relative within a tensor, mean 1."""
    known: dict[str, Doubles | None] = {}
    for value in graph.outputs:
        known[str(value.name)] = _even(value)
    for node in reversed(graph):
        _pass_back(node, known)
    return {name: array for name, array in known.items() if array is not None}


def _pass_back(node: ir.Node, known: dict[str, Doubles | None]) -> None:
    given = known.get(str(node.outputs[0].name)) if node.outputs else None
    for index, value in enumerate(node.inputs):
        if value is None or value.const_value is not None:
            continue
        name = str(value.name)
        part = None if given is None else _share(node, index, value, given)
        before = known.get(name, part)
        if name in known and before is not None and part is not None and before.size == part.size:
            part = _levelled(before + part)
        elif name in known:
            part = None  # read by something whose share is not known
        known[name] = part


def _share(node: ir.Node, index: int, value: ir.Value, given: Doubles) -> Doubles | None:
    """What one input has of the output's importance; None where that cannot be told."""
    channels = _channels(value)
    if node.op_type == "Conv" and index == 0:
        weight = constant_array(node.inputs[1])
        # The channels of a 1-d Conv are not where those of three axes are looked for: its share is not known.
        if weight is None or len(weight) != given.size:
            return None
        return _levelled(_through_conv(weight, given, node))
    if node.op_type in ("Gemm", "MatMul") and index == 0 and not attribute_int(node, "transA", 0):
        weight = constant_array(node.inputs[1])
        if weight is None or weight.ndim != 2:
            return None
        matrix = weight if node.op_type == "Gemm" and attribute_int(node, "transB", 0) else weight.T
        if len(matrix) != given.size:
            return None
        return _levelled(given @ np.square(matrix, dtype=np.float64))
    if node.op_type in _SAME and channels == given.size:
        return given
    return None


def _through_conv(weight: NDArray[Any], given: Doubles, node: ir.Node) -> Doubles:
    groups = attribute_int(node, "group", 1)
    energy = np.square(weight.astype(np.float64)).reshape(*weight.shape[:2], -1).sum(-1)
    split = energy.reshape(groups, -1, weight.shape[1])
    return np.asarray(np.einsum("go,goc->gc", given.reshape(groups, -1), split), np.float64).reshape(-1)


def _even(value: ir.Value) -> Doubles | None:
    channels = _channels(value)
    return None if channels is None else np.ones(channels)


def _channels(value: ir.Value) -> int | None:
    """Axis 1 of images, the last of everything else."""
    shape = static_shape(value)
    if shape is None:
        dims = None if value.shape is None else list(value.shape)
        if dims is None or len(dims) < 2:
            return None
        size = dims[1] if len(dims) > 3 else dims[-1]
        return size if isinstance(size, int) else None
    if len(shape) < 2:
        return None
    return int(shape[1] if len(shape) > 3 else shape[-1])


def _levelled(array: Doubles) -> Doubles | None:
    mean = float(array.mean())
    return array / mean if mean > 0 and np.isfinite(mean) else None
