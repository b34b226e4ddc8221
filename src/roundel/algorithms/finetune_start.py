"""Codes to start from: those of the state, or the walk's solution for the inputs that the layer sees now."""

from __future__ import annotations

import numpy as np

from roundel.algorithms.finetune_constants import Array, Weights
from roundel.algorithms.finetune_rows import Rows
from roundel.algorithms.moments import Moments
from roundel.algorithms.solve import Problem, solve

_CHUNK = 16_000_000  # elements of the inputs taken in at once


def solved_codes(weights: Weights, rows: Rows) -> Array | None:
    """Least-squares codes at the present scale; None where the zero point differs between channels.

    A layer that the walk has rounded was rounded for the inputs of that time. Tuning the layers before it
    changes them, and learning from stale codes ends in a worse place than solving anew first.
    """
    if weights.low.size != 1 or rows.linear is None:
        return None
    parts = [Moments(), Moments()]
    width = max(1, _CHUNK // (rows.inputs.shape[1] * rows.inputs.shape[2]))
    for part, (first, last) in zip(
        parts, ((0, rows.first_held), (rows.first_held, rows.starts[-1])), strict=True
    ):
        for start in range(first, last, width):
            some = slice(start, min(start + width, last))
            part.add(np.asarray(rows.inputs[some], np.float32), rows.linear[some])
    problem = Problem(
        weight=weights.real,
        bias=weights.bias,
        has_bias=weights.bias_params is not None,
        input_scale=weights.input_scale,
        scale=weights.scale,
        limits=(int(weights.low.item()), int(weights.high.item())),
        factors=(1.0,),
        train=parts[0],
        held=parts[1],
    )
    return solve(problem).codes
