"""Where layers stand in the chart: columns from left to right, lanes from top to bottom.

A layer stands one column right of the last thing it reads. In each fork the branch with the longest way to
go keeps the lane, the others open lanes below, and a lane is free again once its branch has ended: the trunk
of a network is one straight line. Everything takes time linear in layers and edges (times the logarithm of
the number of lanes).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


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
