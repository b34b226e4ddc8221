"""What one model says about one sample, in the few numbers that every score follows from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundel.numerics.metrics import Closeness
from roundel.types import Arrays

TOP = 5
_SUMS = ("signal", "noise", "cross", "other", "worst")


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """One model, one sample.

    Attributes:
        shape: of the first output.
        classes: how many, 0 where the first output is not class scores.
        best: the classes with the largest scores of each row, the very largest first; [rows, 0] without any.
        same: rows with the same largest score as the first model.
        close: the first output against the first model's; None for the first, or where shapes differ.
        outputs: all of them, where a metric wants them.
        seconds: inside the model.
    """

    shape: tuple[int, ...]
    classes: int
    best: NDArray[np.int64]
    same: int
    close: Closeness | None
    outputs: dict[str, NDArray[Any]] | None
    seconds: float

    @property
    def rows(self) -> int:
        """Rows that labels are for."""
        return self.shape[0] if len(self.shape) > 1 else 1

    def arrays(self) -> Arrays:
        """Plain arrays that `from_arrays` reads back."""
        c = self.close
        found: Arrays = {
            "shape": np.array(self.shape, np.int64),
            "counts": np.array(
                [self.classes, self.same, 0 if c is None else c.count, c is not None], np.int64
            ),
            "best": self.best,
            "close": np.array([c.signal, c.noise, c.cross, c.other, c.worst] if c else [0.0] * 5, np.float64),
            "seconds": np.array(self.seconds),
        }
        # Names of outputs may hold anything, dots included.
        return found | {f"out.{name}": array for name, array in (self.outputs or {}).items()}

    @staticmethod
    def from_arrays(arrays: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> Look:
        """The inverse of `arrays`; `outputs` names those that were kept."""
        classes, same, count, known = arrays["counts"].tolist()
        return Look(
            tuple(arrays["shape"].tolist()),
            classes,
            arrays["best"],
            same,
            Closeness(**dict(zip(_SUMS, arrays["close"].tolist(), strict=True)), count=count)
            if known
            else None,
            {name: arrays[f"out.{name}"] for name in outputs} or None,
            float(arrays["seconds"]),
        )


def look(
    results: Mapping[str, NDArray[Any]],
    main: str,
    first: NDArray[Any] | None,
    *,
    keep: bool,
    seconds: float,
) -> Look:
    """Look at one model's outputs for one sample.

    Args:
        results: by name.
        main: the name of the first output.
        first: what the first model says; None for itself.
        keep: whether a metric wants all outputs.
        seconds: inside the model.
    """
    scores = results[main]
    comparable = first is not None and first.shape == scores.shape
    close = Closeness.of(first, scores) if first is not None and comparable else None
    outputs = dict(results) if keep else None
    table = class_scores(scores)
    if table is None:
        return Look(scores.shape, 0, np.zeros((0, 0), np.int64), 0, close, outputs, seconds)
    top = table.argmax(1)
    near = np.argpartition(-table, min(TOP, table.shape[1]) - 1, axis=1)[:, :TOP]
    best = np.concatenate([top[:, None], near], axis=1).astype(np.int64)
    same = int((top == first.reshape(table.shape).argmax(1)).sum()) if first is not None and comparable else 0
    return Look(scores.shape, table.shape[1], best, same, close, outputs, seconds)


def class_scores(array: NDArray[Any]) -> NDArray[Any] | None:
    """[rows, classes] of an output that is class scores, None of any other."""
    if array.ndim < 2 or array.shape[1] < 2 or array.size != array.shape[0] * array.shape[1]:
        return None
    return array.reshape(array.shape[:2])
