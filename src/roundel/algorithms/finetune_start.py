"""The walk's solution for the inputs that a layer sees now: codes to start from, and a rival to beat."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from roundel.algorithms.finetune_constants import Weights
from roundel.algorithms.finetune_rows import Rows
from roundel.algorithms.held_out import held_out
from roundel.algorithms.moments import Moments
from roundel.algorithms.solve import Problem, solve
from roundel.types import Doubles

_CHUNK = 16_000_000  # elements of the inputs taken in at once


@dataclass(frozen=True, slots=True, eq=False)
class Solved:
    """Least-squares codes at the present scale.

    Attributes:
        taught: from the rows to learn from alone, so that the held-out rows can judge them.
        whole: from all rows, as the walk's own are; these are used where `taught` wins.
    """

    taught: Doubles
    whole: Doubles


def solved_codes(weights: Weights, rows: Rows) -> Solved | None:
    """Codes solved anew; None where nothing was rounded before or zero points differ between channels.

    A layer that the walk has rounded was rounded for the inputs of that time. Tuning the layers before it
    changes them, and learning from stale codes ends in a worse place than solving anew first.
    """
    if weights.low.size != 1 or rows.linear is None:
        return None
    middle = rows.starts[max(1, rows.held_from - held_out(rows.held_from))]
    early = _moments(rows, 0, middle)
    late = _moments(rows, middle, rows.first_held)
    held = _moments(rows, rows.first_held, rows.starts[-1])
    train = Moments()
    train.merge(early)
    train.merge(late)
    return Solved(_solve(weights, early, late), _solve(weights, train, held))


def _moments(rows: Rows, first: int, last: int) -> Moments:
    sums = Moments()
    assert rows.linear is not None
    for some in _chunks(rows, first, last):
        sums.add(np.asarray(rows.inputs[some], np.float32), rows.linear[some])
    return sums


def _chunks(rows: Rows, first: int, last: int) -> Iterator[slice]:
    width = max(1, _CHUNK // (rows.inputs.shape[1] * rows.inputs.shape[2]))
    for start in range(first, last, width):
        yield slice(start, min(start + width, last))


def _solve(weights: Weights, train: Moments, held: Moments) -> Doubles:
    problem = Problem(
        weight=weights.real,
        bias=weights.bias,
        has_bias=weights.bias_params is not None,
        input_scale=weights.input_scale,
        scale=weights.scale,
        limits=(int(weights.low.item()), int(weights.high.item())),
        factors=(1.0,),
        train=train,
        held=held if held.count.any() else train,
    )
    return solve(problem).codes
