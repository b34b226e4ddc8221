"""Second moments of a layer: all that its least-squares problems need, whatever the number of images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundel.numerics.rounding import damped
from roundel.types import Doubles, FloatArray

_MOST_INPUTS = 768  # of a layer, of which all products are kept
_PART, _LEAST_PART, _MOST_PRODUCTS = 512, 64, 1 << 24
_FEWEST = 2  # samples that have a variance
_NOISE = 1e-6  # what sums of single precision may lose, relative to the square of a value


@dataclass(slots=True)
class Moments:
    """Weighted sums over rows of inputs x (G, n, K) and wanted outputs y (G, n, O); count is (G, 1).

    A layer of very many inputs is cut into parts: only the products of inputs of one part are kept, so `xx`
    is (G * parts, K / parts, K / parts), the last part filled up with zeros, and `xy` (G, K, O) is empty.
    """

    parts: int = 1
    count: Doubles = field(default_factory=lambda: np.zeros((1, 1)))
    xx: FloatArray = field(default_factory=lambda: np.zeros(0))
    xy: FloatArray = field(default_factory=lambda: np.zeros(0))
    x: Doubles = field(default_factory=lambda: np.zeros(0))
    y: Doubles = field(default_factory=lambda: np.zeros(0))

    def add(
        self,
        x: NDArray[np.float32],
        y: NDArray[np.float32],
        weights: NDArray[np.float32] | None = None,
    ) -> None:
        """Take in rows; weights (G, n, 1) say how much each counts."""
        heavy_x, heavy_y, count = x, y, np.full((len(x), 1), float(x.shape[1]))
        if weights is not None:
            heavy_x, heavy_y, count = x * weights, y * weights, weights.sum(1, dtype=np.float64)
        all_rows = np.ones((1, x.shape[1]), np.float32)
        sums = [(all_rows @ heavy)[:, 0].astype(np.float64) for heavy in (heavy_x, heavy_y)]
        if self.parts == 1:
            xx, xy = heavy_x.transpose(0, 2, 1) @ x, x.transpose(0, 2, 1) @ heavy_y
        else:
            cut = in_parts(x.transpose(0, 2, 1), self.parts)
            heavy = cut if weights is None else in_parts(heavy_x.transpose(0, 2, 1), self.parts)
            xx, xy = heavy @ cut.transpose(0, 2, 1), np.zeros((len(x), 0, y.shape[2]), np.float32)
        self.merge(Moments(self.parts, count, xx, xy, *sums))

    def merge(self, more: Moments) -> None:
        """Add another set of sums."""
        if not more.count.any():
            return
        if not self.count.any():
            self.count, self.xx, self.xy, self.x, self.y = (part.astype(np.float64) for part in more._sums())
            return
        for mine, theirs in zip(self._sums(), more._sums(), strict=True):
            mine += theirs

    def _sums(self) -> tuple[FloatArray, ...]:
        return self.count, self.xx, self.xy, self.x, self.y

    def from_zero(self) -> Moments:
        """As if the means were zero: for a layer without a bias to make up for an error of its mean."""
        return replace(self, x=np.zeros_like(self.x), y=np.zeros_like(self.y))

    def around(self, weight: NDArray[np.float32]) -> Missing:
        """What the weights (G, K, O) leave of the outputs, and the centred moments of the inputs."""
        n = np.where(self.count > 0, self.count, 1.0)
        x, y = self.x / n, self.y / n
        xx = self.xx / np.repeat(n, self.parts, 0)[:, :, None]
        square = np.einsum("gkk->gk", xx).copy()
        mean = in_parts(x[:, :, None], self.parts)
        xx -= mean * mean.transpose(0, 2, 1)
        moment = xx.astype(np.float32)
        # Of an input that is constant, only what rounding left of two large sums remains: no variance at all.
        same = np.einsum("gkk->gk", xx) <= _NOISE * square
        offset = y - np.einsum("gko,gk->go", weight, x)
        if self.parts > 1:
            cross = np.zeros_like(weight)
        else:
            cross = (self.xy / n[:, :, None] - x[:, :, None] * y[:, None]).astype(np.float32)
            cross -= moment @ weight
            cross[same] = 0
        if same.any():
            varies = np.where(same, np.float32(0), np.float32(1))
            moment *= varies[:, :, None] * varies[:, None]
        return Missing(moment, cross, x, offset)


@dataclass(frozen=True, slots=True, eq=False)
class HeldRows:
    """Rows that judge, as they are: x (G, n, K), y (G, n, O) and what each row counts (G, n, 1).

    There are few of them, so to look at them costs less than to add up their products.
    """

    x: NDArray[np.float32]
    y: NDArray[np.float32]
    weights: NDArray[np.float32] | None = None

    def missed(self, weight: NDArray[np.float32], outputs: slice = slice(None)) -> NDArray[np.float32]:
        """y - w x, (G, n, O), of some outputs, for their weights (G, K, O)."""
        return np.asarray(self.y[:, :, outputs] - self.x @ weight)

    def mean(self, numbers: FloatArray) -> Doubles:
        """(G, O), over rows of numbers."""
        if self.weights is None:
            return np.asarray(numbers.mean(1, dtype=np.float64))
        total = self.weights.sum(1, dtype=np.float64)
        return np.asarray((numbers * self.weights).sum(1, dtype=np.float64) / np.where(total > 0, total, 1))

    def error(self, weight: NDArray[np.float32], bias: Doubles) -> Doubles:
        """Mean of (y - w x - b)² of each output, (G, O)."""
        missed = self.missed(weight)
        missed -= bias[:, None].astype(np.float32)
        return self.mean(np.square(missed, out=missed))

    def power(self, missed: FloatArray) -> Doubles:
        """Mean square of what is missed."""
        return self.mean(np.square(missed))

    def spread(self, missed: FloatArray) -> Doubles:
        """Mean square of what is missed, less the square of its mean, which a bias makes up for."""
        return self.power(missed) - np.square(self.mean(missed))


def parts_of(size: int) -> int:
    """How many parts a layer of so many inputs for each output is cut into."""
    if size <= _MOST_INPUTS:
        return 1
    return -(-size // min(_PART, max(_LEAST_PART, _MOST_PRODUCTS // size)))


def in_parts(array: NDArray[Any], parts: int) -> NDArray[Any]:
    """(G, K, …) as (G * parts, K / parts, …), with zeros at the end where that does not come out even."""
    if parts == 1:
        return array
    groups, size, *rest = array.shape
    part = -(-size // parts)
    whole = np.zeros((groups, parts * part, *rest), array.dtype)
    whole[:, :size] = array
    return whole.reshape(groups * parts, part, *rest)


def means(rows: NDArray[np.float32], counts: Sequence[int]) -> Doubles:
    """(samples, G, K): of (G, n, K) the mean of each sample's rows, which follow each other."""
    member = np.repeat(np.eye(len(counts), dtype=np.float32), counts, 1)
    return np.asarray((member @ rows).transpose(1, 0, 2) / np.reshape(counts, (-1, 1, 1)).astype(np.float64))


@dataclass(frozen=True, slots=True, eq=False)
class Single:
    """What each sample says alone: it tells what all have in common from chance.

    Attributes:
        x: (samples, G, K), mean inputs.
        y: (samples, G, O), mean wanted outputs.
        rows: of all samples, those that count as if they did not depend on each other.
    """

    x: Doubles
    y: Doubles
    rows: float

    def common(self, weight: NDArray[np.floating], bias: Doubles) -> float:
        """The share of the mean miss of w x + b that other samples will have, too, for w of (G, K, O).

        A mean of a few samples is also what these few happen to have: it shrinks by twice its variance.
        """
        missed = self.y - np.einsum("gko,sgk->sgo", weight, self.x) - bias
        if len(missed) < _FEWEST:
            return 0.0
        chance = float(missed.var(0, ddof=1).sum()) / len(missed)
        whole = float(np.square(missed.mean(0)).sum())
        return max(0.0, 1 - 2 * chance / whole) if whole > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Missing:
    """What weights w leave of a layer's outputs: e = y - w x, less its mean.

    Numbers of the error's own size: single precision will do for all that is made of them.

    Attributes:
        moment: (G, K, K), E[x xᵀ], centred; in parts where the layer has many inputs.
        cross: (G, K, O), E[x eᵀ]; zeros where the moment is in parts.
        mean: (G, K), of the inputs.
        offset: (G, O), the mean of y - w x.
    """

    moment: NDArray[np.float32]
    cross: NDArray[np.float32]
    mean: Doubles
    offset: Doubles


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
