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

from roundel.algorithms.layers import Layer
from roundel.data.spool import Kept, Spool
from roundel.model.graph import clip_bounds, only_reader, values_by_name
from roundel.model.session import open_session
from roundel.types import Sample

_ROWS = 200  # places of each sample
_GROUPED_WORK = 900  # rows x kernel size of a grouped layer: few weights for each channel need few rows
_MOST_BYTES = 1_000_000_000  # in a file beyond what the run may hold


@dataclass(frozen=True, slots=True, eq=False)
class Glimpse:
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
) -> list[list[Glimpse]]:
    """For each layer its glimpses, one for each sample.

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

    def glimpse(index: int) -> list[Glimpse]:
        outputs = session.run(names, samples[index])
        if not share:
            share.append(_share(layers, outputs, len(samples)))
        rng = np.random.default_rng([seed, index])
        pairs = zip(layers, outputs, strict=True)
        return [_glimpse(layer, out, rng, share[0], spool) for layer, out in pairs]

    first = glimpse(0)  # settles the share before others start
    with ThreadPoolExecutor(threads) as pool:
        rows = [first, *pool.map(glimpse, range(1, len(samples)))]
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


def _glimpse(
    layer: Layer, output: NDArray[Any], rng: np.random.Generator, share: float, spool: Spool
) -> Glimpse:
    places = layer.places(output.shape, max(1, int(_rows(layer) * share)), rng)
    spatial = output.shape[2:] if layer.kernel else ()
    return Glimpse(places, spatial, spool.keep(layer.targets(output, places)))
