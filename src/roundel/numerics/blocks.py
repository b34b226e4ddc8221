"""Work on blocks of neighbours along an axis, a cache-sized piece at a time.

A piece is copied so that its blocks stand upright: one row for each place in the block, one column (lane) for
each block. Whatever the axis and the shape, all arithmetic then runs along long contiguous rows.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Kernel = Callable[[Floats, Ints], None]
"""Replaces the values (rows, lanes) by what the block can hold; the second array is room to work in."""

_PIECE = 1 << 18  # values: two megabytes with the work array, about what the caches of one core hold
_LINE = 16  # values in a cache line
_KEPT = threading.local()
_Box = tuple[slice, slice, slice, slice]


def by_block(x: NDArray[Any], axis: int, block: int, kernel: Kernel) -> Floats:
    """Apply the kernel to every block along the axis; the last block of a line may be shorter."""
    source = np.ascontiguousarray(x, np.float32)
    place = axis % source.ndim
    lines = (math.prod(source.shape[:place]), source.shape[place], math.prod(source.shape[place + 1 :]))
    given, result = source.reshape(lines), np.empty(lines, np.float32)
    jobs = []
    whole = lines[1] // block * block
    for start, stop, rows in ((0, whole, block), (whole, lines[1], lines[1] - whole)):
        if stop > start:
            parts = [_upright(array[:, start:stop], rows) for array in (given, result)]
            jobs += [(parts[0][box], parts[1][box]) for box in _boxes(parts[0].shape)]
    _work(jobs, kernel)
    return result.reshape(source.shape)


def _upright(lines: Floats, rows: int) -> Floats:
    """(outer, length, inner) seen as (rows, outer, blocks, inner)."""
    outer, length, inner = lines.shape
    strides = lines.strides
    return np.lib.stride_tricks.as_strided(
        lines,
        (rows, outer, length // rows, inner),
        (strides[1], strides[0], strides[1] * rows, strides[2]),
    )


def _boxes(shape: tuple[int, ...]) -> Iterator[_Box]:
    """Pieces of all rows and at most so many lanes, cut along the inner dimensions last."""
    rows, outer, blocks, inner = shape
    lanes = max(1, _PIECE // rows)
    i = min(inner, lanes)
    b = min(blocks, max(1, lanes // max(i, 1)))
    o = min(outer, max(1, lanes // max(i * b, 1)))
    for first in range(0, outer, max(o, 1)):
        for second in range(0, blocks, max(b, 1)):
            for third in range(0, inner, max(i, 1)):
                yield (
                    slice(None),
                    slice(first, first + o),
                    slice(second, second + b),
                    slice(third, third + i),
                )


def _work(jobs: list[tuple[Floats, Floats]], kernel: Kernel) -> None:
    floats, ints = _room(max((len(given) * _stride(given[0].size) for given, _ in jobs), default=0))
    for given, result in jobs:
        rows, lanes = len(given), given[0].size
        values, spare = (_rows(array, rows, lanes) for array in (floats, ints))
        piece = values.reshape(given.shape)
        np.copyto(piece, given)
        kernel(values, spare)
        np.copyto(result, piece)


def _stride(lanes: int) -> int:
    """Room for a row: an odd number of cache lines, so that rows do not compete for the same ones."""
    return (-(-lanes // _LINE) | 1) * _LINE


def _rows(room: NDArray[Any], rows: int, lanes: int) -> NDArray[Any]:
    stride = _stride(lanes)
    return room[: rows * stride].reshape(rows, stride)[:, :lanes]


def _room(size: int) -> tuple[Floats, Ints]:
    """Work arrays, kept by each thread: new memory costs more than the work on a tensor of medium size."""
    found = getattr(_KEPT, "arrays", None)
    kept: tuple[Floats, Ints] = found or (np.empty(size, np.float32), np.empty(size, np.int32))
    if kept[0].size < size:
        kept = np.empty(size, np.float32), np.empty(size, np.int32)
    _KEPT.arrays = kept
    return kept
