"""What each layer gives in the float model, at a few places of each sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.data.kept import Kept, Spool
from roundel.model.graph import (
    attribute_int,
    clip_bounds,
    constant_array,
    only_reader,
    static_shape,
    values_by_name,
)
from roundel.model.layers import Layer
from roundel.model.session import open_session
from roundel.targets.operators import Trait, ops_with
from roundel.types import Doubles, Sample

_ROWS = 200  # places of each sample
_GROUPED_WORK = 900  # rows x kernel size of a grouped layer: few weights for each channel need few rows
_MOST_BYTES = 1_000_000_000  # in a file beyond what the run may hold


@dataclass(frozen=True, slots=True, eq=False)
class SampledTargets:
    """One layer's output on one sample: the places looked at, and the values there."""

    places: NDArray[np.intp]
    spatial: tuple[int, ...]
    kept: Kept

    @property
    def values(self) -> NDArray[np.float32]:
        """One row for each place."""
        return self.kept.get()


def float_targets(
    model: ir.Model,
    layers: Sequence[Layer],
    samples: Sequence[Sample],
    *,
    seed: int = 0,
    threads: int = 2,
) -> list[list[SampledTargets]]:
    """For each layer what it should give, for each sample.

    The places are drawn from the seed and the sample's number alone, so the result does not depend on
    how many threads take part.
    """
    watched = model.clone()
    values = values_by_name(watched.graph)
    shown = {value.name for value in watched.graph.outputs}
    names = [layer.output for layer in layers]
    for name in names:
        if name not in shown:
            watched.graph.outputs.append(values[name])
            shown.add(name)
    session = open_session(watched, threads=1)
    share: list[float] = []
    spool = Spool()

    def sampled(index: int) -> list[SampledTargets]:
        outputs = session.run(names, samples[index])
        if not share:
            share.append(_share(layers, outputs, len(samples)))
        rng = np.random.default_rng([seed, index])
        pairs = zip(layers, outputs, strict=True)
        return [_sampled(layer, out, rng, share[0], spool) for layer, out in pairs]

    first = sampled(0)  # settles the share before others start
    with ThreadPoolExecutor(threads) as pool:
        rows = [first, *pool.map(sampled, range(1, len(samples)))]
    return [list(column) for column in zip(*rows, strict=True)]


def visible_ranges(graph: ir.Graph) -> dict[str, tuple[float, float]]:
    """The range in which a tensor's values still matter, where a Relu or Clip alone reads it."""
    found = {}
    for node in graph:
        value = node.inputs[0] if node.op_type in ("Relu", "Clip") else None
        if value is None or only_reader(value) is not node:
            continue
        low, high = (0.0, None) if node.op_type == "Relu" else clip_bounds(node) or (None, None)
        found[str(value.name)] = (-math.inf if low is None else low, math.inf if high is None else high)
    return found


def _rows(layer: Layer) -> int:
    return max(16, _GROUPED_WORK // math.prod(layer.kernel)) if layer.groups > 1 else _ROWS


def _share(layers: Sequence[Layer], outputs: Sequence[NDArray[Any]], samples: int) -> float:
    """The share of the usual rows that is worth their room."""
    total = 0
    for layer, out in zip(layers, outputs, strict=True):
        channels = out.shape[1] if layer.kernel else out.shape[-1]
        total += min(_rows(layer), out.size // max(channels, 1)) * channels * 4 * samples
    return min(1.0, _MOST_BYTES / max(total, 1))


def _sampled(
    layer: Layer, output: NDArray[Any], rng: np.random.Generator, share: float, spool: Spool
) -> SampledTargets:
    places = layer.places(output.shape, max(1, int(_rows(layer) * share)), rng)
    spatial = output.shape[2:] if layer.kernel else ()
    return SampledTargets(places, spatial, spool.keep(layer.targets(output, places)))


_SAME = ops_with(Trait.CHANNELWISE)


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
        part = None if given is None else _share_of(node, index, value, given)
        before = known.get(name, part)
        if name in known and before is not None and part is not None and before.size == part.size:
            part = _levelled(before + part)
        elif name in known:
            part = None  # read by something whose share is not known
        known[name] = part


def _share_of(node: ir.Node, index: int, value: ir.Value, given: Doubles) -> Doubles | None:
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
