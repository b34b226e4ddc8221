"""Where layers stand in the chart: columns from left to right, lanes from top to bottom.

A layer stands one column right of the last thing it reads. In each fork the branch with the longest way to
go keeps the lane, the others open lanes below, and a lane is free again once its branch has ended: the trunk
of a network is one straight line. Everything takes time linear in layers and edges (times the logarithm of
the number of lanes).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from roundel.report.html.values import causes, origin, short

if TYPE_CHECKING:
    from roundel.measure import types
    from roundel.rules.types import NodePlace, Prediction


@dataclass(frozen=True, slots=True)
class Layout:
    """Places of layers.

    Attributes:
        columns: of each layer.
        lanes: of each layer.
    """

    columns: tuple[int, ...]
    lanes: tuple[int, ...]


def lay_out(sources: Sequence[Sequence[int]]) -> Layout:
    """Place every layer.

    Args:
        sources: for each layer the layers that it reads; each must come before it.
    """
    readers: list[list[int]] = [[] for _ in sources]
    for layer, before in enumerate(sources):
        for source in before:
            readers[source].append(layer)
    columns = _columns(sources, readers)
    return Layout(tuple(columns), tuple(_lanes(sources, _heirs(readers), columns)))


def _columns(sources: Sequence[Sequence[int]], readers: Sequence[Sequence[int]]) -> list[int]:
    columns = [0] * len(sources)
    for layer, before in enumerate(sources):
        columns[layer] = 1 + max((columns[source] for source in before), default=-1)
    # An input that is read late stands beside its reader, not at the far left.
    for layer, before in enumerate(sources):
        if not before and readers[layer]:
            columns[layer] = min(columns[reader] for reader in readers[layer]) - 1
    return columns


def _heirs(readers: Sequence[Sequence[int]]) -> list[int | None]:
    """Of each layer the reader with the longest way to go: it continues the lane."""
    ways = [0] * len(readers)
    heirs: list[int | None] = [None] * len(readers)
    for layer in range(len(readers) - 1, -1, -1):
        if readers[layer]:
            heir = max(readers[layer], key=lambda reader: ways[reader])
            heirs[layer], ways[layer] = heir, ways[heir] + 1
    return heirs


def _lanes(
    sources: Sequence[Sequence[int]], heirs: Sequence[int | None], columns: Sequence[int]
) -> list[int]:
    lanes = [0] * len(sources)
    ends: dict[int, int] = {}  # lane -> the layer that holds it
    free: list[int] = []
    width = 0
    standing: list[list[int]] = [[] for _ in range(max(columns, default=-1) + 1)]
    ending: list[list[int]] = [[] for _ in standing]
    for layer, column in enumerate(columns):
        standing[column].append(layer)
        heir = heirs[layer]
        ending[column if heir is None else columns[heir]].append(layer)
    for column, layers in enumerate(standing):
        for layer in layers:
            left = [lanes[s] for s in sources[layer] if heirs[s] == layer and ends.get(lanes[s]) == s]
            if left:
                lane = min(left)
            elif free:
                lane = heapq.heappop(free)
            else:
                lane, width = width, width + 1
            lanes[layer], ends[lane] = lane, layer
        for layer in ending[column]:
            if ends.get(lanes[layer]) == layer:
                del ends[lanes[layer]]
                heapq.heappush(free, lanes[layer])
    return lanes


Ranges = Sequence[tuple[float, float]]
Steps = Mapping[str, Sequence[Sequence[Any]]]

_MOST_CHANNELS = 512  # drawn of one weight; beyond that neighbours share a bar
_ALL_CHANNELS = 60_000  # drawn of all weights together: a page must stay small
_FEWEST_CHANNELS = 32


def layer_values(
    comparison: types.Comparison, split: Prediction | None, steps: Steps
) -> list[dict[str, Any]]:
    """Every compared tensor with the layer behind it, its place in the chart and what the figures mean.

    Args:
        comparison: of both models.
        split: where the quantized model's nodes are expected to run.
        steps: what the improving steps did, by name of the layer's main node.
    """
    numbers = {tensor.name: index for index, tensor in enumerate(comparison.tensors)}
    weights = {weight.name: weight for weight in comparison.weights}
    order = {name: index for index, name in enumerate(weights)}
    sources = [
        [numbers[name] for name in tensor.sources if numbers.get(name, index) < index]
        for index, tensor in enumerate(comparison.tensors)
    ]
    layout = lay_out(sources)
    places = {} if split is None else {node.name: node for node in split.nodes}
    found = []
    for index, tensor in enumerate(comparison.tensors):
        own = tuple(weights[name] for name in tensor.weights if name in weights)
        found.append(
            {
                **_figures(tensor),
                "from": sources[index],
                "at": [layout.columns[index], layout.lanes[index]],
                "weights": [order[weight.name] for weight in own],
                "origin": origin(tensor),
                "why": list(causes(tensor, own)),
                "steps": list(steps.get(tensor.node, ())) if tensor.node else [],
                **_place([places[name] for name in tensor.nodes if name in places]),
            }
        )
    return found


def weight_values(weights: Sequence[types.WeightComparison]) -> list[dict[str, Any]]:
    """Every weight; ranges of channels only where there are several values in each."""
    unique = {weight.name: weight for weight in weights}
    ranged = sum(1 for weight in unique.values() if _has_ranges(weight))
    most = max(_FEWEST_CHANNELS, min(_MOST_CHANNELS, _ALL_CHANNELS // max(1, 2 * ranged)))
    return [_weight(weight, most) for weight in unique.values()]


def thinned(ranges: Ranges, most: int) -> list[tuple[float, float]]:
    """At most so many ranges: neighbours are united."""
    ends = np.asarray(ranges, np.float64)
    starts = np.arange(0, len(ends), -(-len(ends) // most))
    lows, highs = np.minimum.reduceat(ends[:, 0], starts), np.maximum.reduceat(ends[:, 1], starts)
    return list(zip(lows.tolist(), highs.tolist(), strict=True))


def _figures(t: types.TensorComparison) -> dict[str, Any]:
    return {
        "name": t.node or t.name,
        "tensor": t.name,
        "op": t.op,
        "place": t.place,
        "nodes": list(t.nodes),
        "shape": list(t.shape),
        "stored": _storage(t.storage),
        **{part: _db(getattr(t, part)) for part in ("introduced", "inherited", "total", "rounding")},
        "effect": short(t.effect),
        "cosine": short(t.total.cosine),
        "worst": short(t.total.worst),
        "cut": short(t.saturated),
        "use": short(t.range_use),
        "values": [short(t.float_low), short(t.float_high)],
        "axis": t.channel_axis,
        "channels": _channels(t),
        "histogram": [short(t.histogram.low), short(t.histogram.high), list(t.histogram.counts)],
        "rescaled": t.rescaled,
    }


def _place(nodes: Sequence[NodePlace]) -> dict[str, Any]:
    """Where a layer runs: on the CPU as soon as one of its nodes does."""
    if not nodes:
        return {"runs": None, "island": None, "macs": None, "cpu": []}
    off = [node for node in nodes if node.island is None]
    return {
        "runs": "cpu" if off else "npu",
        "island": None if off else nodes[-1].island,
        "macs": sum(node.macs or 0 for node in nodes),
        "cpu": [f"{node.op}: {node.reason}" for node in off],
    }


def _has_ranges(weight: types.WeightComparison) -> bool:
    return weight.role == "weight" and len(weight.float_ranges) > 1


def _weight(w: types.WeightComparison, most: int) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "name": w.name,
        "role": w.role,
        "op": w.op,
        "shape": list(w.shape),
        "stored": _storage(w.storage),
        "error": _db(w.error),
        "cut": short(w.saturated),
        "axis": w.channel_axis,
        "channels": _channels(w),
        "rescaled": w.rescaled,
    }
    if _has_ranges(w):
        tree["count"] = len(w.float_ranges)
        tree["before"] = _flat(thinned(w.float_ranges, most)) if w.rescaled else None
        tree["after"] = _flat(thinned(w.stored_ranges, most))
        tree["spread"] = [_spread(w.float_ranges) if w.rescaled else None, _spread(w.stored_ranges)]
    return tree


def _channels(item: types.TensorComparison | types.WeightComparison) -> list[list[Any]]:
    return [[c.channel, short(c.sqnr_db), short(c.share)] for c in item.worst_channels]


def _flat(ranges: Ranges) -> list[float | int | str | None]:
    return [short(float(f"{end:.3g}")) for pair in ranges for end in pair]


def _spread(ranges: Ranges) -> float | int | str | None:
    """How much wider the widest channel is than the median of those that are not all zero."""
    sizes = np.abs(np.asarray(ranges, np.float64)).max(axis=1)
    live = sizes[sizes > 0]
    return short(float(live.max() / np.median(live))) if live.size else None


def _storage(storage: types.TensorStorage | None) -> dict[str, Any] | None:
    if storage is None:
        return None
    step = {name: short(getattr(storage, name)) for name in ("low", "high", "scale")}
    return {"type": storage.dtype, **step, "scales": storage.scales}


def _db(difference: types.Difference | None) -> float | int | str | None:
    return None if difference is None else short(difference.sqnr_db)
