"""Layers that read the same tensor, and what the data shows of its channels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.algorithms.linear_layers import Linear, read_linear
from roundel.calibrate.runner import Runner
from roundel.errors import DataError
from roundel.passes.rewriting import dims
from roundel.plan.types import QuantPlan
from roundel.types import Sample

_ROW_BYTES = 128_000_000  # of all groups together
_MOST_ROWS = 512


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Layers that read one tensor along its last axis.

    Attributes:
        value: the tensor.
        layers: its readers with constant weights.
        shared: whether anything else sees it: another node, a graph output, a body.
    """

    value: ir.Value
    layers: tuple[Linear, ...]
    shared: bool

    @property
    def name(self) -> str:
        """The tensor's name."""
        return str(self.value.name)

    @property
    def channels(self) -> int:
        """How many inputs the layers have."""
        return int(self.layers[0].weight.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What the data shows of one tensor.

    Attributes:
        low: the smallest value of each channel.
        high: the largest.
        rows: some rows of samples that low and high have not seen, for judging.
    """

    low: NDArray[np.float64]
    high: NDArray[np.float64]
    rows: NDArray[np.float32]

    @property
    def magnitudes(self) -> NDArray[np.float64]:
        """The largest absolute value of each channel."""
        return np.maximum(np.abs(self.low), np.abs(self.high))


def find_groups(graph: ir.Graph, plan: QuantPlan) -> tuple[Group, ...]:
    """The groups with at least one quantized layer, in graph order."""
    found: dict[ir.Value, list[Linear]] = {}
    for node in graph:
        layer = read_linear(node)
        value = node.inputs[0] if layer is not None else None
        if layer is not None and value is not None and (dims(value) or (None,))[-1] == layer.weight.shape[0]:
            found.setdefault(value, []).append(layer)
    return tuple(
        Group(value, tuple(layers), len(value.uses()) > len(layers) or value.is_graph_output())
        for value, layers in found.items()
        if any(plan.nodes[layer.name].quantized for layer in layers)
    )


def look(
    model: ir.Model, groups: Sequence[Group], learn: Sequence[Sample], judge: Sequence[Sample]
) -> dict[str, Seen]:
    """Run the samples, one at a time: the extremes of each channel, and rows to judge by.

    Args:
        model: the float model; it is not changed.
        groups: whose tensors to look at.
        learn: samples that give the extremes.
        judge: samples that give the rows.

    Raises:
        DataError: a sample does not fit the model, or a tensor is not finite.
        ModelError: ONNX Runtime cannot run the model.
    """
    fed = {value.name for value in model.graph.inputs}
    names = [group.name for group in groups if group.name not in fed]
    runner = Runner(model, names, learn[0], cores=os.cpu_count() or 1, samples=1)
    width = {group.name: group.channels for group in groups}
    most = min(_MOST_ROWS, max(16, _ROW_BYTES // (4 * sum(width.values()))))
    low = {name: np.full(size, np.inf) for name, size in width.items()}
    high = {name: np.full(size, -np.inf) for name, size in width.items()}
    rows: dict[str, list[NDArray[Any]]] = {name: [] for name in width}
    for index, sample in enumerate((*learn, *judge)):
        for run in runner.stream(sample, index, finals=False):
            for name, array in {**_given(sample, width), **run.tensors}.items():
                flat = array.reshape(-1, width[name])
                if not np.isfinite(flat).all():
                    raise _not_finite(name, index)
                if index < len(learn):
                    np.minimum(low[name], flat.min(axis=0), out=low[name])
                    np.maximum(high[name], flat.max(axis=0), out=high[name])
                else:
                    rows[name].append(_spread(flat, most // len(judge) or 1))
    return {name: Seen(low[name], high[name], np.concatenate(rows[name])) for name in width}


def _not_finite(name: str, index: int) -> DataError:
    return DataError(
        "A tensor holds NaN or infinity.",
        where=f"tensor '{name}', sample {index}",
        expected="finite values",
        hint="Look at the node that makes it, and at the sample.",
    )


def _given(sample: Sample, width: dict[str, int]) -> dict[str, NDArray[Any]]:
    return {name: array for name, array in sample.items() if name in width}


def _spread(flat: NDArray[Any], most: int) -> NDArray[Any]:
    """Rows at even distances, copied: the rest of the tensor must not stay in memory."""
    picked = np.linspace(0, len(flat) - 1, min(most, len(flat))).astype(int)
    return np.array(flat[picked], np.float32)
