"""Second moments of what a layer reads, in the quantized and in the float model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundel.numerics.rounding import damped
from roundel.types import Doubles

Rows = NDArray[Any]
Pairs = Iterable[tuple[Rows, Rows]]

_CHUNK = 2048  # rows added up in float32 before they join the float64 sums
_SLAB = 4096  # outputs at a time


@dataclass(frozen=True, slots=True, eq=False)
class InputMoments:
    """Sums over rows x of the float model's inputs and s of those that the quantized model sees.

    All that the weights of a layer need, however many outputs it has and however many rows there were.

    Attributes:
        seen: (inputs, inputs), sum of s sᵀ.
        cross: sum of x sᵀ.
    """

    seen: Doubles
    cross: Doubles

    @staticmethod
    def of(pairs: Pairs, width: int) -> InputMoments:
        """Add up (s, x) of sample after sample; both may have any leading dimensions."""
        found = InputMoments(np.zeros((width, width)), np.zeros((width, width)))
        for seen, plain in _chunks(pairs, width):
            found.seen[...] += _product(seen, seen)
            found.cross[...] += _product(plain, seen)
        return found

    def take(self, more: InputMoments) -> None:
        """Add the rows of others."""
        self.seen[...] += more.seen
        self.cross[...] += more.cross

    def pull(self, ridge: float) -> Doubles:
        """A matrix M so that W M are the weights that best give W x from s, held to W by a ridge."""
        held = damped(self.seen[None], ridge)[0]
        wanted = self.cross.copy()
        wanted[np.diag_indices_from(wanted)] += np.diagonal(held) - np.diagonal(self.seen)
        return np.asarray(np.linalg.solve(held, wanted.T).T)


@dataclass(frozen=True, slots=True, eq=False)
class HeldMoments:
    """Moments that judge: with those of the float model alone, `plain` (sum of x xᵀ), errors follow."""

    moments: InputMoments
    plain: Doubles

    @staticmethod
    def of(pairs: Pairs, width: int) -> HeldMoments:
        """As in `InputMoments`."""
        found = HeldMoments(
            InputMoments(np.zeros((width, width)), np.zeros((width, width))), np.zeros((width, width))
        )
        for seen, plain in _chunks(pairs, width):
            found.moments.take(InputMoments(_product(seen, seen), _product(plain, seen)))
            found.plain[...] += _product(plain, plain)
        return found

    def error(self, weight: NDArray[Any], wanted: NDArray[Any]) -> float:
        """Squared error of `weight` s against `wanted` x, added up over rows and outputs."""
        total = self.signal(wanted)
        for start in range(0, len(weight), _SLAB):
            got, want = (w[start : start + _SLAB].astype(np.float64) for w in (weight, wanted))
            total += float(((got @ self.moments.seen - 2 * want @ self.moments.cross) * got).sum())
        return max(total, 0.0)

    def signal(self, wanted: NDArray[Any]) -> float:
        """Square of `wanted` x, added up over rows and outputs."""
        total = 0.0
        for start in range(0, len(wanted), _SLAB):
            want = wanted[start : start + _SLAB].astype(np.float64)
            total += float(((want @ self.plain) * want).sum())
        return total


def _product(one: Rows, other: Rows) -> NDArray[Any]:
    with np.errstate(over="ignore", invalid="ignore"):  # whoever asks for the sums checks them
        return np.asarray(one.T @ other)


def _chunks(pairs: Pairs, width: int) -> Iterator[tuple[Rows, Rows]]:
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
