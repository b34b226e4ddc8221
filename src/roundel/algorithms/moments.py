"""Second moments of a layer: all that its least-squares problems need, whatever the number of images."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

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
