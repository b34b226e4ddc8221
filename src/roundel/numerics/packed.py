"""Weights in few bits, a scale for each run of inputs: ranges, rounding to nearest, and bytes.

All functions take a weight as (outputs, inputs). See `PackedScheme` for the format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundel.types import Doubles, PackedScheme

Bytes = NDArray[np.uint8]

_FACTORS = tuple(float(f) for f in np.linspace(1.0, 0.6, 17))  # of the range that clips nothing
_SLAB = 250_000  # weights at a time: the search stays in the cache and needs little memory


@dataclass(frozen=True, slots=True, eq=False)
class PackedParams:
    """Scale and zero point of each block: (outputs, blocks)."""

    scale: NDArray[np.float32]
    zero: Bytes

    def columns(self, size: int, inputs: int) -> tuple[Doubles, Doubles]:
        """Scale and zero point of each weight: (outputs, inputs)."""
        scale, zero = (np.repeat(part, size, axis=1)[:, :inputs] for part in (self.scale, self.zero))
        return scale.astype(np.float64), zero.astype(np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A weight as it is stored: codes (outputs, inputs), and what they stand for."""

    codes: Bytes
    params: PackedParams
    scheme: PackedScheme

    def restored(self) -> NDArray[np.float32]:
        """The weights that the codes stand for, computed as the operator does."""
        scale = np.repeat(self.params.scale, self.scheme.size, axis=1)[:, : self.codes.shape[1]]
        zero = np.repeat(self.params.zero, self.scheme.size, axis=1)[:, : self.codes.shape[1]]
        return (self.codes.astype(np.float32) - zero.astype(np.float32)) * scale


def round_packed(weight: NDArray[Any], scheme: PackedScheme, *, search: bool) -> Packed:
    """Round to nearest.

    Args:
        weight: (outputs, inputs).
        scheme: how to store it.
        search: choose each block's range by least squared error; otherwise it holds the extremes.
    """
    rows = max(1, _SLAB // max(weight.shape[1], 1))
    parts = []
    for start in range(0, weight.shape[0], rows):
        slab = weight[start : start + rows].astype(np.float64)
        params = packed_params(slab, scheme, search=search)
        parts.append((nearest_codes(slab, params, scheme), params.scale, params.zero))
    codes, scale, zero = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Packed(codes, PackedParams(scale, zero), scheme)


def packed_params(
    weight: Doubles, scheme: PackedScheme, *, search: bool, importance: Doubles | None = None
) -> PackedParams:
    """Scales and zero points.

    Args:
        weight: (outputs, inputs).
        scheme: how it will be stored.
        search: choose each block's range by least squared error; otherwise it holds the extremes.
        importance: how much the squared error of each input counts, (inputs,); all alike when not given.
    """
    blocks = in_blocks(weight, scheme.size)
    low, high = np.minimum(blocks.min(-1), 0), np.maximum(blocks.max(-1), 0)
    best = _params(low, high, scheme)
    if not search:
        return best
    error_of = _Error(blocks, scheme, importance)
    least = error_of(best)
    for factor in _FACTORS[1:]:
        tried = _params(low * factor, high * factor, scheme)
        error = error_of(tried)
        better = error < least
        least = np.where(better, error, least)
        scale, zero = np.where(better, tried.scale, best.scale), np.where(better, tried.zero, best.zero)
        best = PackedParams(scale, zero)
    return best


def nearest_codes(weight: Doubles, params: PackedParams, scheme: PackedScheme) -> Bytes:
    """The codes next to the weights."""
    scale, zero = params.columns(scheme.size, weight.shape[1])
    return np.clip(np.rint(weight / scale + zero), 0, scheme.top).astype(np.uint8)


def in_blocks(rows: NDArray[Any], size: int) -> NDArray[Any]:
    """(rows, blocks, size) of (rows, inputs); zeros fill the last block."""
    missing = -rows.shape[1] % size
    whole = np.pad(rows, ((0, 0), (0, missing))) if missing else rows
    return whole.reshape(rows.shape[0], -1, size)


def in_bytes(codes: Bytes, bits: int) -> Bytes:
    """Codes of 2, 4 or 8 bits side by side along the last axis, the first in the lowest bits of a byte.

    Zeros fill a last byte that is not full.
    """
    share = 8 // bits
    missing = -codes.shape[-1] % share
    whole = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)]) if missing else codes
    result = np.zeros((*whole.shape[:-1], whole.shape[-1] // share), np.uint8)
    for place in range(share):
        result |= whole[..., place::share] << np.uint8(place * bits)
    return result


def _params(low: Doubles, high: Doubles, scheme: PackedScheme) -> PackedParams:
    if not scheme.symmetric:
        scale = _usable((high - low) / scheme.top)
        zero = np.clip(np.rint(-low / scale.astype(np.float64)), 0, scheme.top)
        return PackedParams(scale, zero.astype(np.uint8))
    below, above = scheme.middle, scheme.middle - 1
    step = np.maximum(-low / below, high / above)
    if scheme.mirrored:
        turned = np.maximum(-low / above, high / below)
        step = np.where(turned < step, -turned, step)
    scale = _usable(step)
    return PackedParams(scale, np.full(scale.shape, scheme.middle, np.uint8))


def _usable(step: Doubles) -> NDArray[np.float32]:
    """As float32; one where a block is all zeros, or so small that float32 has no normal number for it."""
    scale = step.astype(np.float32)
    return np.where(np.abs(scale) < np.finfo(np.float32).tiny, np.float32(1), scale)


class _Error:
    """Squared error of each block with other parameters: float32 and no new arrays, since it is asked often.

    Args:
        blocks: (outputs, blocks, size).
        scheme: how they are stored.
        importance: of each input, or None where all are alike.
    """

    def __init__(self, blocks: Doubles, scheme: PackedScheme, importance: Doubles | None) -> None:
        self._blocks, self._scheme = blocks.astype(np.float32), scheme
        self._room = np.empty_like(self._blocks)
        self._roots: NDArray[np.float32] | None = None
        if importance is not None:
            roots = np.sqrt(importance / max(float(importance.max()), 1e-300))
            self._roots = in_blocks(roots[None], scheme.size).astype(np.float32)

    def __call__(self, params: PackedParams) -> Doubles:
        miss, scale = self._room, params.scale[..., None]
        zero = params.zero[..., None].astype(np.float32)
        np.divide(self._blocks, scale, out=miss)
        np.rint(miss, out=miss)
        np.clip(miss, -zero, self._scheme.top - zero, out=miss)
        np.multiply(miss, scale, out=miss)
        np.subtract(miss, self._blocks, out=miss)
        if self._roots is not None:
            np.multiply(miss, self._roots, out=miss)
        return np.asarray(np.einsum("obs,obs->ob", miss, miss), np.float64)
