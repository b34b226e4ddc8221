"""GPTQ for packed weights: weights are rounded input by input, and those to come make up for the error.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roundel.numerics.packed import Packed, PackedParams, packed_params
from roundel.numerics.rounding import damped, factor
from roundel.types import Doubles, PackedScheme

_SPAN = 128  # inputs between two updates of all behind them: a whole number of blocks, or a part of one
_SLAB = 8_000_000  # weights at a time: rows do not depend on each other


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """How the error of one input's weights is made up for by others.

    Attributes:
        order: the inputs, first to be rounded first.
        ordered: whether that is another order than theirs.
        upper: upper Cholesky factor of the inverse second moment, in that order.
        power: mean square of each input, in its own order.
    """

    order: NDArray[np.intp]
    ordered: bool
    upper: Doubles
    power: Doubles


def spread(moment: Doubles, damping: float, *, act_order: bool) -> Spread:
    """Prepare the rounding of all weights that read the same inputs.

    Args:
        moment: (inputs, inputs), the mean of x xᵀ.
        damping: share of its mean diagonal to add to it.
        act_order: begin with the inputs of the most power.
    """
    power = np.diagonal(moment).copy()
    order = np.argsort(-power, kind="stable") if act_order else np.arange(len(power))
    held = damped(moment[None], damping)[:, order[:, None], order]
    return Spread(order, act_order, factor(held)[0], power)


def gptq(target: NDArray[np.floating], spreading: Spread, scheme: PackedScheme, *, search: bool) -> Packed:
    """Codes whose output error is small on the inputs behind the moment.

    Args:
        target: (outputs, inputs), the weights that would be best without rounding.
        spreading: from the inputs that they meet.
        scheme: how to store them.
        search: choose each block's range by least squared error; otherwise it holds the extremes.
    """
    rows = max(1, _SLAB // target.shape[1])
    parts = []
    for start in range(0, len(target), rows):
        slab = target[start : start + rows].astype(np.float64)
        done = _rounded(slab, spreading, scheme, search)
        parts.append((done.codes, done.params.scale, done.params.zero))
    codes, scale, zero = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Packed(codes, PackedParams(scale, zero), scheme)


def _rounded(target: Doubles, spreading: Spread, scheme: PackedScheme, search: bool) -> Packed:
    order, upper, ordered = spreading.order, spreading.upper, spreading.ordered
    # In the inputs' own order, each block's range is chosen when its turn comes; these are for room only.
    params = packed_params(target, scheme, search=search and ordered, importance=spreading.power)
    scale, zero = (part[:, order] for part in params.columns(scheme.size, target.shape[1]))
    work, codes = target[:, order], np.empty(target.shape, np.uint8)
    size = target.shape[1]
    for start in range(0, size, _SPAN):
        stop = min(start + _SPAN, size)
        errors = np.empty((len(target), stop - start))
        for k in range(start, stop):
            if k % scheme.size == 0 and not ordered:
                block = slice(k, min(k + scheme.size, size))
                moved = packed_params(
                    work[:, block], scheme, search=search, importance=spreading.power[block]
                )
                params.scale[:, k // scheme.size] = moved.scale[:, 0]
                params.zero[:, k // scheme.size] = moved.zero[:, 0]
                scale[:, block], zero[:, block] = moved.columns(scheme.size, block.stop - k)
            column = work[:, k]
            code = np.clip(np.rint(column / scale[:, k] + zero[:, k]), 0, scheme.top)
            codes[:, order[k]] = code
            error = (column - (code - zero[:, k]) * scale[:, k]) / upper[k, k]
            errors[:, k - start] = error
            work[:, k + 1 : stop] -= error[:, None] * upper[k, k + 1 : stop]
        work[:, stop:] -= errors @ upper[start:stop, stop:]
    return Packed(codes, params, scheme)
