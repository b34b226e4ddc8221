"""Work on blocks of neighbours along an axis, a cache-sized piece at a time.

A piece is copied so that its blocks stand upright: one row for each place in the block, one column (lane) for
each block. Whatever the axis and the shape, all arithmetic then runs along long contiguous rows.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundel.numerics import floats as fb
from roundel.numerics.floats import Floats, Ints, Rounding, round_bfloat16

Kernel = Callable[[Floats, Ints], None]
"""Replaces the values (rows, lanes) by what the block can hold; the second array is room to work in."""

_PIECE = 1 << 18  # values: two megabytes with the work array, about what the caches of one core hold
_LINE = 16  # values in a cache line
_KEPT = threading.local()
_Box = tuple[slice, slice, slice, slice]


def by_block(x: NDArray[Any], axis: int, block: int, kernel: Kernel) -> Floats:
    """Apply the kernel to every block along the axis; the last block of a line may be shorter.

    One value alone stays as it is.
    """
    if x.size <= 1:
        return np.array(x, np.float32)
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


OVERFLOWING_CODE = 128
"""Of the compiler's variant, whatever the width."""


@dataclass(frozen=True, slots=True)
class BlockFloat:
    """A block floating point format.

    Attributes:
        bit_width: 8 bits of shared exponent, a sign, and the rest for the multiple: 10 to 32 in all.
        block_size: neighbours that share an exponent.
        rounding: of ties.
        compiler: give a block one exponent more where its largest value would round up to 128 steps, instead
            of holding it at the limit.
        bfloat16_first: round to bfloat16 before anything else.
    """

    bit_width: int = 16
    block_size: int = 8
    rounding: Rounding = Rounding.HALF_EVEN
    compiler: bool = False
    bfloat16_first: bool = False

    @property
    def digits(self) -> int:
        """Bits of a multiple, without its sign."""
        return self.bit_width - 9

    def apply(self, x: NDArray[Any], axis: int) -> Floats:
        """The values as the blocks along an axis hold them. NaN, infinity and one value alone stay."""
        return by_block(round_bfloat16(x) if self.bfloat16_first else x, axis, self.block_size, self._block)

    def _block(self, values: Floats, spare: Ints) -> None:
        peaks = np.maximum.reduce(fb.magnitudes(values, spare), axis=0)
        if self.compiler or self.digits > 22 or not fb.ordinary(peaks):
            values[...] = self._exact(values)
            return
        exponents = fb.exponents(peaks)
        magic = (exponents + np.int32((24 - self.digits) << fb.MANTISSA | fb.HALF)).view(np.float32)
        limit = (exponents | np.int32(-1 << (24 - self.digits) & 0x7FFFFF)).view(np.float32)
        step = magic * np.float32(2.0**-fb.MANTISSA / 1.5)
        zeros = fb.vanishing_negatives(values, step) if self.rounding is Rounding.HALF_EVEN else None
        np.minimum(values, limit, out=values)
        np.maximum(values, -limit, out=values)
        fb.snap(values, magic, spare, self.rounding)
        if zeros is not None:
            values[zeros] = -0.0

    def _exact(self, values: Floats) -> Floats:
        """The definition, for all numbers that there are."""
        bits = values.view(np.int32) & fb.MAGNITUDE
        finite = bits < fb.EXPONENT
        fields = fb.biased(np.where(finite, bits, 0))
        shared = fields.max(0)
        with np.errstate(all="ignore"):
            step, top = fb.power(shared, 1 - self.digits), 2.0**self.digits - 1
            low, high = -top, top
            if self.compiler:
                codes = fb.nearest(values / step, self.rounding)
                over = (codes >= OVERFLOWING_CODE) | (codes < -OVERFLOWING_CODE)
                raised = (over & (fields == shared) & finite).any(0)
                step = np.where(raised, step * np.float32(2), step)
                low, high = -(2.0 ** (2 * self.digits - 1)), 2.0 ** (self.digits - 1) * top  # hardly reached
            codes = np.clip(fb.nearest(values / step, self.rounding), low, high)
            return np.where(finite, codes * step, values)


NAN = np.int32(0x7FFFFFFF).view(np.float32)
"""The NaN that fills a block."""


@dataclass(frozen=True, slots=True)
class MicroExponents:
    """A micro-exponent format.

    Attributes:
        bit_width: 8 bits of shared exponent, a sign, and the rest for the multiple: 10 to 32 in all.
        block_size: neighbours that share an exponent.
        sub_block_size: neighbours that share a shift; divides the block size.
        sub_block_shift_bits: bits of a shift.
        rounding: of ties.
        bfloat16_first: round to bfloat16 before anything else.
    """

    bit_width: int = 13
    block_size: int = 16
    sub_block_size: int = 2
    sub_block_shift_bits: int = 1
    rounding: Rounding = Rounding.HALF_EVEN
    bfloat16_first: bool = False

    @property
    def digits(self) -> int:
        """Bits of a multiple, without its sign."""
        return self.bit_width - 9

    @property
    def reach(self) -> int:
        """Exponents that a sub-block may lie below its block."""
        return int(2**self.sub_block_shift_bits) - 1

    def apply(self, x: NDArray[Any], axis: int) -> Floats:
        """The values as the blocks along an axis hold them. One value alone stays as it is."""
        return by_block(round_bfloat16(x) if self.bfloat16_first else x, axis, self.block_size, self._block)

    def _block(self, values: Floats, spare: Ints) -> None:
        tops = self._tops(fb.magnitudes(values, spare))
        peaks = np.maximum.reduce(tops, axis=0)
        if self.digits > 22 or not fb.ordinary(peaks):
            values[...] = self._exact(values)
            return
        floor = fb.exponents(peaks) - np.int32(min(self.reach, 128) << fb.MANTISSA)
        tops = np.maximum(fb.exponents(tops), floor)
        magic = (tops + np.int32((24 - self.digits) << fb.MANTISSA | fb.HALF)).view(np.float32)
        tops |= np.int32(-1 << (24 - self.digits) & 0x7FFFFF)
        limit = tops.view(np.float32)
        signs = values.view(np.int32) & np.int32(-0x80000000)
        for row in range(0, len(values), self.sub_block_size):
            rows, sub = slice(row, row + self.sub_block_size), row // self.sub_block_size
            part = values[rows]
            np.minimum(part, limit[sub], out=part)
            np.maximum(part, -limit[sub], out=part)
            fb.snap(part, magic[sub], spare[rows], self.rounding)
        values.view(np.int32)[...] |= signs

    def _tops(self, bits: Ints) -> Ints:
        """The largest of each sub-block: (sub-blocks, lanes). The last one may be short."""
        size = self.sub_block_size
        if len(bits) % size == 0:
            return np.asarray(bits.reshape(-1, size, bits.shape[1]).max(1))
        return np.maximum.reduceat(bits, range(0, len(bits), size), axis=0)

    def _exact(self, values: Floats) -> Floats:
        """The definition, for all numbers that there are."""
        bits = values.view(np.int32) & fb.MAGNITUDE
        tops = fb.biased(self._tops(bits))
        shared = tops.max(0)
        level = np.maximum(tops, shared - np.int32(self.reach))
        level = np.repeat(level, self.sub_block_size, axis=0)[: len(values)]
        largest = np.float32(2.0**self.digits - 1)
        with np.errstate(all="ignore"):
            step = fb.power(level, 1 - self.digits)
            codes = np.clip(fb.nearest(values / step, self.rounding), -largest, largest)
            held = np.where(fb.biased(bits) == 0, np.float32(0), codes * step)
            return np.where(shared == 255, NAN, np.copysign(held, values))


@dataclass(frozen=True, slots=True)
class Element:
    """An element type.

    Attributes:
        exponent_bits: 0 for the integer, whose unit is 2**-6.
        mantissa_bits: explicit ones.
        top: exponent of the largest power of two that it holds.
        largest: the largest number.
    """

    exponent_bits: int
    mantissa_bits: int
    top: int
    largest: float

    @property
    def bottom(self) -> int:
        """Exponent of the smallest normal number."""
        return int(2 - 2 ** (self.exponent_bits - 1))


ELEMENTS = {
    "fp8_e5m2": Element(5, 2, 15, 57344.0),
    "fp8_e4m3": Element(4, 3, 8, 448.0),
    "fp6_e3m2": Element(3, 2, 4, 28.0),
    "fp6_e2m3": Element(2, 3, 2, 7.5),
    "fp4_e2m1": Element(2, 1, 2, 6.0),
    "int8": Element(0, 8, 0, 127.0),
}
"""By the names of AMD's operator."""
INTEGER_UNIT = 6
"""The integer element is a multiple of 2**-6."""
LOWEST_CODE = -128.0
"""Of the integer element."""


@dataclass(frozen=True, slots=True)
class Microscaling:
    """A microscaling format.

    Attributes:
        element_dtype: a key of ELEMENTS.
        block_size: neighbours that share a scale.
        rounding: of ties, for the integer; the floats always round half to even.
    """

    element_dtype: str = "int8"
    block_size: int = 32
    rounding: Rounding = Rounding.HALF_EVEN

    @property
    def element(self) -> Element:
        """The element type."""
        return ELEMENTS[self.element_dtype]

    def apply(self, x: NDArray[Any], axis: int) -> Floats:
        """The values as the blocks along an axis hold them. NaN, infinity and one value alone stay."""
        kernel = self._floats if self.element.exponent_bits else self._integers
        return by_block(x, axis, self.block_size, kernel)

    def _integers(self, values: Floats, spare: Ints) -> None:
        peaks = np.maximum.reduce(fb.magnitudes(values, spare), axis=0)
        if not fb.ordinary(peaks):
            values[...] = self._exact(values)
            return
        exponents = fb.exponents(peaks)
        unit = exponents.view(np.float32)
        magic = (exponents + np.int32((fb.MANTISSA - INTEGER_UNIT) << fb.MANTISSA | fb.HALF)).view(np.float32)
        zeros = fb.vanishing_negatives(values, unit) if self.rounding is Rounding.HALF_EVEN else None
        np.minimum(values, unit * np.float32(self.element.largest * 2.0**-INTEGER_UNIT), out=values)
        fb.snap(values, magic, spare, self.rounding)
        if zeros is not None:
            values[zeros] = -0.0

    def _floats(self, values: Floats, spare: Ints) -> None:
        bits = fb.magnitudes(values, spare)
        peaks = np.maximum.reduce(bits, axis=0)
        if not fb.ordinary(peaks):
            values[...] = self._exact(values)
            return
        element, exponents = self.element, fb.exponents(peaks)
        limit = np.ldexp(exponents.view(np.float32), -element.top) * np.float32(element.largest)
        floor = np.maximum(exponents - np.int32((element.top - element.bottom) << fb.MANTISSA), 0)
        np.maximum(bits, floor, out=bits)
        bits &= fb.EXPONENT
        bits += np.int32((fb.MANTISSA - element.mantissa_bits) << fb.MANTISSA | fb.HALF)
        np.minimum(values, limit, out=values)
        np.maximum(values, -limit, out=values)
        fb.snap(values, bits.view(np.float32), spare, Rounding.HALF_EVEN)

    def _exact(self, values: Floats) -> Floats:
        """The definition, for all numbers that there are."""
        bits = values.view(np.int32) & fb.MAGNITUDE
        finite = bits < fb.EXPONENT
        shared = fb.biased(np.where(finite, bits, 0)).max(0)
        element = self.element
        with np.errstate(all="ignore"):
            scale = fb.power(shared, -element.top)
            scaled = values / scale
            if element.exponent_bits == 0:
                codes = fb.nearest(scaled * np.float32(2.0**INTEGER_UNIT), self.rounding)
                held = np.clip(codes, LOWEST_CODE, element.largest) * np.float32(2.0**-INTEGER_UNIT)
            else:
                size = np.maximum(np.abs(scaled), np.float32(2.0**element.bottom))
                first = np.asarray(size.view(np.int32) & fb.EXPONENT).view(np.float32)
                magic = first * np.float32(1.5 * 2.0 ** (fb.MANTISSA - element.mantissa_bits))
                held = np.clip((scaled + magic) - magic, -element.largest, element.largest)
            return np.where(finite, scale * held, values)
