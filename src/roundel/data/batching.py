"""Rows of the user's batches, regrouped into the batch that the model has fixed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from roundel.errors import DataError
from roundel.types import InputSpec, Sample


def fixed_batch(inputs: Sequence[InputSpec]) -> int | None:
    """The batch size that the model insists on, or None where there is no single one.

    There is one when the first dimension of every input is a number, the same everywhere. Beside an open
    batch, a fixed first dimension is something else: a state, a table, the two sides of an image.
    """
    sizes = {spec.shape[0] if spec.shape else None for spec in inputs}
    only = sizes.pop() if len(sizes) == 1 else None
    return only if isinstance(only, int) and only > 0 else None


class Regrouper:
    """Cuts and joins batches so that each leaves with exactly the model's batch size.

    With no fixed batch every sample passes as it is. Rows that wait are copied: a source may reuse its
    buffer.
    """

    def __init__(self, inputs: Sequence[InputSpec]) -> None:
        self._names = [spec.name for spec in inputs]
        self._size = fixed_batch(inputs)
        self._waiting: list[Sample] = []
        self.leftover = 0

    @property
    def size(self) -> int | None:
        """The model's batch size, None when it is open."""
        return self._size

    def push(self, sample: Sample, where: str) -> Iterator[Sample]:
        """Take one conformed sample and give back all complete batches.

        Raises:
            DataError: when the inputs of one sample have different numbers of rows.
        """
        if self._size is None:
            yield sample
            return
        rows = self._rows(sample, where)
        start = 0
        while start + (need := self._size - self.leftover) <= rows:
            part = {name: sample[name][start : start + need] for name in self._names}
            yield self._joined(part)
            start += need
        if start < rows:
            self._waiting.append({name: sample[name][start:].copy() for name in self._names})
            self.leftover += rows - start

    def _joined(self, part: Sample) -> Sample:
        if not self._waiting:
            return part
        parts = [*self._waiting, part]
        self._waiting, self.leftover = [], 0
        return {name: np.concatenate([p[name] for p in parts]) for name in self._names}

    def _rows(self, sample: Sample, where: str) -> int:
        rows: dict[str, int] = {name: sample[name].shape[0] for name in self._names}
        if len(set(rows.values())) > 1:
            raise DataError(
                "The inputs of one sample have different batch sizes",
                where=where,
                observed=", ".join(f"'{name}' has {count}" for name, count in rows.items()),
                expected="the same number of rows for every input",
            )
        return next(iter(rows.values()))
