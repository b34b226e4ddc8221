"""Second moments of what a layer reads, in the quantized and in the float model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundel.numerics.rounding import damped

Array = NDArray[np.float64]
Rows = NDArray[Any]

_CHUNK = 2048  # rows added up in float32 before they join the float64 sums


@dataclass(frozen=True, slots=True, eq=False)
class InputMoments:
    """Means over rows x of the float model's inputs and s of those that the quantized model sees.

    All that the weights of a layer need, however many outputs it has and however many rows there were.

    Attributes:
        seen: (inputs, inputs), mean of s sᵀ.
        cross: mean of x sᵀ.
        plain: mean of x xᵀ.
        count: number of rows.
    """

    seen: Array
    cross: Array
    plain: Array
    count: int

    @staticmethod
    def of(pairs: Iterable[tuple[Rows, Rows]], width: int) -> InputMoments:
        """Add up (s, x) of sample after sample; both may have any leading dimensions."""
        sums = [np.zeros((width, width)) for _ in range(3)]
        count = 0
        for seen, plain in _chunks(pairs, width):
            with np.errstate(over="ignore", invalid="ignore"):  # whoever asks checks for it
                products = (seen.T @ seen, plain.T @ seen, plain.T @ plain)
            for total, product in zip(sums, products, strict=True):
                total += product
            count += len(seen)
        means = [total / max(count, 1) for total in sums]
        return InputMoments(means[0], means[1], means[2], count)

    def merged(self, other: InputMoments) -> InputMoments:
        """Over the rows of both."""
        count = max(self.count + other.count, 1)
        share = self.count / count
        parts = ((self.seen, other.seen), (self.cross, other.cross), (self.plain, other.plain))
        seen, cross, plain = (mine * share + theirs * (1 - share) for mine, theirs in parts)
        return InputMoments(seen, cross, plain, count)

    def pull(self, ridge: float) -> Array:
        """A matrix M so that W M are the weights that best give W x from s, held to W by a ridge."""
        held = damped(self.seen[None], ridge)[0]
        return np.asarray(np.linalg.solve(held, (self.cross + held - self.seen).T).T)

    def error(self, weight: NDArray[Any], wanted: NDArray[Any]) -> float:
        """Mean squared error of `weight` s against `wanted` x, added up over the outputs."""
        total = 0.0
        for got, want in _slabs(weight, wanted):
            total += float(((got @ self.seen - 2 * want @ self.cross) * got).sum())
            total += float(((want @ self.plain) * want).sum())
        return max(total, 0.0)

    def signal(self, wanted: NDArray[Any]) -> float:
        """Mean square of `wanted` x, added up over the outputs."""
        return sum(float(((want @ self.plain) * want).sum()) for want, _ in _slabs(wanted, wanted))


def _slabs(one: NDArray[Any], other: NDArray[Any], rows: int = 4096) -> Iterator[tuple[Array, Array]]:
    for start in range(0, len(one), rows):
        part = slice(start, start + rows)
        yield one[part].astype(np.float64), other[part].astype(np.float64)


def _chunks(pairs: Iterable[tuple[Rows, Rows]], width: int) -> Iterator[tuple[Rows, Rows]]:
    """The rows of several samples together: large products are fast ones."""
    waiting: list[tuple[Rows, Rows]] = []
    for seen, plain in pairs:
        waiting.append((seen.reshape(-1, width), plain.reshape(-1, width)))
        if sum(len(rows) for rows, _ in waiting) >= _CHUNK:
            yield _joined(waiting)
            waiting = []
    if waiting:
        yield _joined(waiting)


def _joined(waiting: list[tuple[Rows, Rows]]) -> tuple[Rows, Rows]:
    return np.concatenate([seen for seen, _ in waiting]), np.concatenate([plain for _, plain in waiting])
