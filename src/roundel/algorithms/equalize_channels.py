"""Channels that must share a factor, those that must not change, and how far the others may go."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.intp]


class Channels:
    """A union-find over the channels of every tensor that a layer makes."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._block: list[int] = []
        self._blocks = 0
        self._fixed: list[Ids] = []
        self._caps: list[tuple[Ids, NDArray[np.float64]]] = []

    def fresh(self, count: int) -> Ids:
        """New channels, of one tensor, that nothing is tied to yet."""
        start = len(self._parent)
        self._parent.extend(range(start, start + count))
        self._block.extend([self._blocks] * count)
        self._blocks += 1
        return np.arange(start, start + count)

    def tie(self, left: Ids, right: Ids) -> None:
        """Channel by channel, both need the same factor."""
        for a, b in zip(left.tolist(), right.tolist(), strict=True):
            a, b = self._root(a), self._root(b)
            if a != b:
                self._parent[max(a, b)] = min(a, b)

    def fix(self, ids: Ids) -> None:
        """These keep the factor 1."""
        self._fixed.append(ids)

    def cap(self, ids: Ids, most: NDArray[np.float64]) -> None:
        """These may not grow beyond a factor each; below 1 means that they may not change at all."""
        self._caps.append((ids, most))

    def settle(self) -> Settled:
        """Everything that was said, resolved."""
        count = len(self._parent)
        roots = np.array([self._root(i) for i in range(count)], np.intp)
        fixed = np.zeros(count, bool)
        for ids in self._fixed:
            fixed[roots[ids]] = True
        most = np.full(count, np.inf)
        for ids, limits in self._caps:
            np.minimum.at(most, roots[ids], limits)
        fixed |= most < 1
        return Settled(roots, fixed[roots], most[roots], self._spaces(roots))

    def _root(self, index: int) -> int:
        parent = self._parent
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    def _spaces(self, roots: Ids) -> Ids:
        """The number of the space of each channel: tensors with tied channels are one space."""
        label = list(range(self._blocks))

        def find(block: int) -> int:
            while label[block] != block:
                label[block] = label[label[block]]
                block = label[block]
            return block

        for index in np.flatnonzero(roots != np.arange(len(roots))).tolist():
            a, b = find(self._block[index]), find(self._block[int(roots[index])])
            label[max(a, b)] = min(a, b)
        return np.array([find(block) for block in self._block], np.intp)


@dataclass(frozen=True, slots=True, eq=False)
class Settled:
    """For each channel: its representative, whether it is fixed, its largest factor, its space."""

    roots: Ids
    fixed: NDArray[np.bool_]
    most: NDArray[np.float64]
    spaces: Ids
