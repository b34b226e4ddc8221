"""Affine quantization of arrays: the same numbers, bit for bit, as ONNX QuantizeLinear / DequantizeLinear."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from roundel.types import PerChannel, QParams, QType, ScaleKind, Scheme

_F32_HALF_MAX = float(np.finfo(np.float32).max) / 2


def code_limits(scheme: Scheme) -> tuple[int, int]:
    """The codes that ranges are mapped onto.

    Signed symmetric types leave out the lowest code, so that zero sits in the exact middle.
    """
    qmin, qmax = scheme.qtype.qmin, scheme.qtype.qmax
    if scheme.reduce_range:
        half = 2 ** (scheme.qtype.bits - 2)
        return (-half, half) if scheme.qtype.signed else (0, qmax // 2)
    if scheme.symmetric and scheme.qtype.signed:
        return -qmax, qmax
    return qmin, qmax


def params_from_range(low: ArrayLike, high: ArrayLike, scheme: Scheme) -> QParams:
    """Scale and zero point that cover [low, high] (arrays along the channel axis when per channel).

    The interval is widened to hold zero, since zero must be exact (padding). A range of width zero
    gets scale 1; of an asymmetric type the codes then start at zero, as for any range without negatives.
    """
    lo = np.minimum(np.asarray(low, np.float64), 0.0).clip(-_F32_HALF_MAX, 0)
    hi = np.maximum(np.asarray(high, np.float64), 0.0).clip(0, _F32_HALF_MAX)
    if scheme.symmetric:
        hi = np.maximum(-lo, hi)
        lo = -hi
    qmin, qmax = code_limits(scheme)
    raw = (hi - lo) / float(qmax - qmin)
    degenerate = raw < np.finfo(np.float32).tiny
    scale = round_scale(np.where(degenerate, 1.0, raw), scheme.scale)
    axis = scheme.granularity.axis if isinstance(scheme.granularity, PerChannel) else None
    return QParams(scale, _zero_point(lo, scale, scheme), scheme.qtype, axis)


def _zero_point(lo: Any, scale: Any, scheme: Scheme) -> NDArray[Any]:
    qmin, qmax = code_limits(scheme)
    if scheme.symmetric:
        # The middle of an unsigned type: 128 of 0..255, as the NPU expects, never 127.
        middle = 0 if scheme.qtype.signed else (scheme.qtype.qmax + 1) // 2
        return np.full(np.shape(scale), middle, scheme.qtype.dtype)
    zero = np.clip(np.rint(qmin - lo / scale.astype(np.float64)), qmin, qmax)
    return np.asarray(zero).astype(scheme.qtype.dtype)


def round_scale(scale: ArrayLike, kind: ScaleKind) -> NDArray[np.float32]:
    """The nearest scale that the kind allows."""
    value = np.asarray(scale, np.float64)
    if kind is ScaleKind.POWER_OF_TWO:
        return np.asarray(np.exp2(np.clip(np.rint(np.log2(value)), -126, 127)), np.float32)
    if kind is ScaleKind.INT16:
        return int16_ratio(value)
    return np.asarray(value, np.float32)


def int16_ratio(scale: ArrayLike) -> NDArray[np.float32]:
    """The nearest M / 2**N with 0 <= N <= 16 and a positive 16-bit M."""
    value = np.asarray(scale, np.float64)
    powers = 2.0 ** np.arange(17)
    scaled = value[..., None] * powers
    numerators = np.clip(np.stack([np.floor(scaled), np.ceil(scaled)], -1), 1, 32767)
    candidates = (numerators / powers[:, None]).reshape(*value.shape, -1)
    best = np.abs(candidates - value[..., None]).argmin(-1)
    nearest = np.take_along_axis(candidates, best[..., None], -1)[..., 0]
    return np.asarray(nearest, np.float32)


def quantize(x: NDArray[Any], params: QParams, *, narrow: bool = False) -> NDArray[Any]:
    """Round half to even onto the codes, saturating.

    Args:
        x: real values, computed with in float32 as ONNX Runtime does (float64 for 32-bit codes,
            whose range float32 cannot hold exactly).
        params: scale and zero point.
        narrow: leave out the lowest code of a signed type (weights of the symmetric schemes).
    """
    work = np.float64 if params.qtype.bits == 32 else np.float32
    scale, zero = _spread(params, x.ndim)
    # asarray: numpy turns results without dimensions into scalars, which cannot be written to.
    codes = np.asarray(np.rint(x.astype(work, copy=False) / scale.astype(work)))
    if zero.any():
        codes += zero.astype(work)
    low = params.qtype.qmin + (1 if narrow and params.qtype.signed else 0)
    np.clip(codes, low, params.qtype.qmax, out=codes)
    return codes.astype(params.qtype.dtype)


def dequantize(codes: NDArray[Any], params: QParams) -> NDArray[np.float32]:
    """(q - zero point) * scale in float32."""
    scale, zero = _spread(params, codes.ndim)
    shifted = codes.astype(np.int32) - zero.astype(np.int32)
    return np.asarray(shifted.astype(np.float32) * scale, np.float32)


def fake_quantize(x: NDArray[Any], params: QParams, *, narrow: bool = False) -> NDArray[np.float32]:
    """Quantize, then dequantize: the value that the quantized model sees."""
    return dequantize(quantize(x, params, narrow=narrow), params)


def weight_params(weight: NDArray[Any], scheme: Scheme) -> QParams:
    """Scale and zero point from a constant's own extremes."""
    if isinstance(scheme.granularity, PerChannel):
        axis = scheme.granularity.axis % weight.ndim
        rest = tuple(i for i in range(weight.ndim) if i != axis)
        return params_from_range(weight.min(rest, initial=0), weight.max(rest, initial=0), scheme)
    if weight.size == 0:
        return params_from_range(0.0, 0.0, scheme)
    return params_from_range(weight.min(), weight.max(), scheme)


def bias_params(input_scale: NDArray[np.float32], weight: QParams, factor: float = 1.0) -> QParams:
    """The int32 bias shares the accumulator's step: input scale x weight scale (x Gemm's alpha / beta)."""
    scale = (input_scale.astype(np.float64) * weight.scale.astype(np.float64) * factor).astype(np.float32)
    axis = 0 if scale.ndim else None
    return QParams(scale, np.zeros(scale.shape, np.int32), QType.INT32, axis)


def _spread(params: QParams, ndim: int) -> tuple[NDArray[Any], NDArray[Any]]:
    if params.axis is None or params.scale.ndim == 0:
        return params.scale.reshape(()), params.zero_point.reshape(())
    shape = [1] * ndim
    shape[params.axis % ndim] = -1
    return params.scale.reshape(shape), params.zero_point.reshape(shape)


_SQUARE_POOLS = {3: (7, 6), 5: (10, 8), 6: (7, 8), 7: (21, 10), 14: (21, 12)}  # side: (k, n) of the hardware

HARD_SIGMOID_GAIN = 2731 * 6 / 16384


def reciprocal_gain(count: int) -> float:
    """count * k / 2**n for the k / 2**n next to 1 / count that the hardware finds first."""
    best_error, best = math.inf, 1.0
    for n in range(7 + math.ceil(math.log2(count)) if count > 1 else 1):
        k = round(2**n / count)
        error = abs(k / 2**n - 1 / count)
        if error < best_error:
            best_error, best = error, count * k / 2**n
    return best


def pool_gain(height: int, width: int) -> float:
    """The gain of an average pool with this kernel."""
    if max(height, width) > 255:
        return 1.0
    if height == width and height in _SQUARE_POOLS:
        k, n = _SQUARE_POOLS[height]
        return float(height * width * k / 2**n)
    return reciprocal_gain(height * width)
