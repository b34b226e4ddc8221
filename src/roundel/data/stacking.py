"""Which axis of a big array are the samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roundel.data.conform import Shape
from roundel.errors import DataError
from roundel.types import InputSpec


@dataclass(frozen=True, slots=True)
class Stack:
    """How an array holds samples.

    Args:
        count: number of samples along the first axis; None when the whole array is one sample.
        keep_axis: whether a sample keeps the first axis, with size 1, as its batch axis.
    """

    count: int | None
    keep_axis: bool = True


def stack_of(shape: Shape, spec: InputSpec, where: str) -> Stack:
    """Read the rank of an array against the rank of its input.

    Same rank: the first axis are samples, each fed with batch 1, unless the array has exactly the fixed shape
    of the input and is one sample. One more: the first axis are samples that have a batch axis of their own.
    One
    less: a single sample without its batch axis. An input of unknown rank takes rows with batch 1.

    Raises:
        DataError: for any other rank.
    """
    rank = None if spec.shape is None else len(spec.shape)
    if rank is None and shape:
        return Stack(shape[0])
    if spec.shape is not None:
        exact = len(shape) == rank and (rank == 0 or isinstance(spec.shape[0], int))
        if exact and all(not isinstance(w, int) or w == d for w, d in zip(spec.shape, shape, strict=True)):
            return Stack(None)
    if len(shape) == rank:
        return Stack(shape[0])
    if rank is not None and len(shape) == rank + 1:
        return Stack(shape[0], keep_axis=False)
    if rank is None or len(shape) == rank - 1:
        return Stack(None)
    raise DataError(
        f"The array for input '{spec.name}' does not have the rank of samples",
        where=where,
        observed=f"shape {list(shape)}, {len(shape)} axes",
        expected=f"{spec}: {rank} axes with the samples first, or {rank + 1} when each has a batch axis",
    )


def common_count(stacks: Sequence[tuple[str, Stack]]) -> int:
    """The number of samples that all inputs agree on.

    Raises:
        DataError: when they do not.
    """
    counts = {name: 1 if stack.count is None else stack.count for name, stack in stacks}
    if len(set(counts.values())) > 1:
        raise DataError(
            "The inputs have different numbers of samples",
            observed=", ".join(f"'{name}' has {count}" for name, count in counts.items()),
            expected="the same number of samples for every input",
        )
    return next(iter(counts.values()), 0)
