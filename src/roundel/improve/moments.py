"""Second moments of a layer: all that its least-squares problems need, whatever the number of images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundel.numerics.rounding import damped
from roundel.types import Doubles

_NOISE = 1e-6  # what sums of single precision may lose, relative to the square of a value


@dataclass(slots=True)
class Moments:
    """Weighted sums over rows of inputs x (n, G, K) and wanted outputs y (n, G, O); count is (G, 1)."""

    count: Doubles = field(default_factory=lambda: np.zeros((1, 1)))
    xx: Doubles = field(default_factory=lambda: np.zeros(0))
    xy: Doubles = field(default_factory=lambda: np.zeros(0))
    yy: Doubles = field(default_factory=lambda: np.zeros(0))
    x: Doubles = field(default_factory=lambda: np.zeros(0))
    y: Doubles = field(default_factory=lambda: np.zeros(0))

    def add(
        self,
        inputs: NDArray[np.float32],
        outputs: NDArray[np.float32],
        weights: NDArray[np.float32] | None = None,
    ) -> None:
        """Take in rows; weights (n, G) say how much each counts."""
        x = np.ascontiguousarray(inputs.transpose(1, 0, 2))
        y = np.ascontiguousarray(outputs.transpose(1, 0, 2))
        heavy_x, heavy_y, count = x, y, np.full((len(x), 1), float(inputs.shape[0]))
        if weights is not None:
            each = weights.T[:, :, None]
            heavy_x, heavy_y, count = x * each, y * each, each.sum(1, dtype=np.float64)
        xx = (heavy_x.transpose(0, 2, 1) @ x).astype(np.float64)
        xy = (heavy_y.transpose(0, 2, 1) @ x).astype(np.float64)
        yy = np.einsum("gno,gno->go", heavy_y, y, dtype=np.float64)
        sums = heavy_x.sum(1, dtype=np.float64), heavy_y.sum(1, dtype=np.float64)
        self.merge(Moments(count, xx, xy, yy, *sums))

    def merge(self, more: Moments) -> None:
        """Add another set of sums."""
        if not more.count.any():
            return
        if not self.count.any():
            self.count, self.xx, self.xy, self.yy, self.x, self.y = (part.copy() for part in more._sums())
            return
        for mine, theirs in zip(self._sums(), more._sums(), strict=True):
            mine += theirs

    def _sums(self) -> tuple[Doubles, ...]:
        return self.count, self.xx, self.xy, self.yy, self.x, self.y

    def centred(self) -> Centred:
        """Means and centred second moments."""
        n = np.where(self.count > 0, self.count, 1.0)
        x, y = self.x / n, self.y / n
        xx = self.xx / n[:, :, None] - x[:, :, None] * x[:, None, :]
        xy = self.xy / n[:, :, None] - y[:, :, None] * x[:, None, :]
        # Of an input that is constant, only what rounding left of two large sums remains: no variance at all.
        constant = np.einsum("gkk->gk", xx) <= _NOISE * np.einsum("gkk->gk", self.xx) / n
        varies = np.where(constant, 0.0, 1.0)
        xx *= varies[:, :, None] * varies[:, None, :]
        xy *= varies[:, None, :]
        return Centred(xx, xy, self.yy / n - y * y, x, y)


@dataclass(frozen=True, slots=True)
class Centred:
    """Centred moments: xx (G, K, K), xy (G, O, K), yy (G, O), and the means x (G, K), y (G, O)."""

    xx: Doubles
    xy: Doubles
    yy: Doubles
    x: Doubles
    y: Doubles

    def error(self, weight: Doubles, bias: Doubles) -> Doubles:
        """E[(w x + b - y)²] of each output, (G, O)."""
        spread = np.einsum("gok,gok->go", weight @ self.xx - 2 * self.xy, weight) + self.yy
        offset = np.einsum("gok,gk->go", weight, self.x) + bias - self.y
        return np.asarray(spread + offset * offset)


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
