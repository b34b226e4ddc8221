"""Channel factors of models that another tool has equalized, read off the weights.

Equalization multiplies the rows of one layer and divides the columns of the next. A float tensor between
them must get the same factors before it can be compared. For each layer, the factor of a row is the one that
fits the float weights to the stored ones best; it counts only where the fit explains the layer and plain
rounding does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.algorithms.equalize_layers import read_layer
from roundel.algorithms.equalize_trace import Trace
from roundel.compare.matching import Matches
from roundel.model.graph import values_by_name
from roundel.types import Doubles

_FEWEST = 4  # weights in a row; fewer are fitted by chance
_GAIN_DB = 10.0  # rounding alone gains less than 2 dB from one factor for each row
_GOOD_DB = 15.0
_BY_ROW, _BY_COLUMN = (2, 3), (1, 3)


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """What the channels of a float tensor are multiplied by.

    Attributes:
        axis: of the channels.
        values: one for each channel.
    """

    axis: int
    values: NDArray[np.float32]

    def apply(self, array: NDArray[Any]) -> NDArray[Any]:
        """The tensor as the quantized model has it."""
        shape = [1] * array.ndim
        shape[self.axis] = -1
        return np.asarray(array * self.values.reshape(shape))


def find_factors(
    stripped: ir.Model, matches: Matches
) -> tuple[dict[str, Factors], dict[str, tuple[Doubles, Doubles]]]:
    """Factors of tensors and layers of the float graph.

    The quantized graph is the one that was equalized: where its tool has put a Relu in place of a Clip,
    channels are free that the float graph would hold.

    Args:
        stripped: the quantized model without Q/DQ pairs, shapes known: its weights are the stored ones.
        matches: partners of its tensors and nodes.

    Returns:
        Factors by tensor name; and (rows, columns) by node name, for layers that were rescaled.
    """
    trace = Trace(stripped.graph, absorb=False)
    settled = trace.channels.settle()
    factors, known = np.ones(len(settled.roots)), settled.fixed.copy()
    layers: dict[str, tuple[Doubles, Doubles]] = {}
    tensors: dict[str, Factors] = {}
    for layer, (given, made) in zip(trace.layers, trace.sides, strict=True):
        node = matches.nodes.get(str(layer.node.name))
        plain = None if node is None else read_layer(node)
        if node is None or plain is None or plain.weight.shape != layer.weight.shape:
            continue
        if given is not None:
            columns = factors[settled.roots[given]]
        else:  # behind a norm, which may have taken the factors: smoothing
            columns = 1 / _fit(plain.weight, layer.weight, _BY_COLUMN)
            source = matches.tensors.get(str(layer.node.inputs[0].name)) if layer.node.inputs[0] else None
            if source is not None and np.any(columns != 1):
                tensors[str(source.name)] = Factors(layer.data_axis, columns.astype(np.float32))
        groups, _, inputs, _ = layer.weight.shape
        stored = layer.weight * columns.reshape(groups, 1, inputs, 1)
        roots = settled.roots[made]
        rows = np.where(known[roots], factors[roots], _fit(plain.weight, stored, _BY_ROW))
        factors[roots], known[roots] = rows, True
        if np.any(rows != 1) or np.any(columns != 1):
            layers[str(node.name)] = rows, columns
    for name, value in values_by_name(stripped.graph).items():
        ours, flow = matches.tensors.get(name), trace.flow(value)
        if ours is not None and flow.ids is not None and np.any(factors[settled.roots[flow.ids]] != 1):
            tensors[str(ours.name)] = Factors(flow.axis, factors[settled.roots[flow.ids]].astype(np.float32))
    return tensors, layers


def _fit(plain: NDArray[Any], stored: NDArray[Any], summed: tuple[int, int]) -> Doubles:
    """The factor of each row, or of each column; ones where the layer was not rescaled.

    Args:
        plain: float weights, (groups, outputs, inputs, kernel).
        stored: stored weights, likewise.
        summed: the axes that share a factor.
    """
    a, b = plain.astype(np.float64), stored.astype(np.float64)
    power = np.square(a).sum(axis=summed, keepdims=True)
    one = np.ones(power.size)
    if a.size < _FEWEST * power.size:
        return one
    live = power > 0
    factors = np.where(live, (a * b).sum(axis=summed, keepdims=True) / np.where(live, power, 1), 1.0)
    factors = np.where(factors > 0, factors, 1.0)  # a row of zeros, or nonsense: not a factor
    before, after = np.square(b - a).sum(), np.square(b - a * factors).sum()
    signal = np.square(b).sum()
    explained = after == 0 or 10 * np.log10(signal / after) >= _GOOD_DB
    if before == 0 or not explained or (after > 0 and 10 * np.log10(before / after) < _GAIN_DB):
        return one
    return np.asarray(factors.reshape(-1))
