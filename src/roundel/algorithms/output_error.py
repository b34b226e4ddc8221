"""How far a model's outputs are off, all of which count alike.

Boxes in pixels and scores between 0 and 1 differ in power by millions: summed up as they are, nobody would
notice what becomes of the scores. So each output counts relative to its own power, and so does each part of
one that a detection head has joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.numerics.metrics import Closeness
from roundel.plan.detection_head import joined_outputs

Errors = Mapping[tuple[str, int], Closeness]


class OutputErrors:
    """The errors of one model's outputs."""

    def __init__(self, graph: ir.Graph) -> None:
        self.names = [str(value.name) for value in graph.outputs]
        self._joints = joined_outputs(graph)

    def of(self, wanted: Mapping[str, NDArray[Any]], given: Sequence[NDArray[Any]]) -> Errors:
        """For one sample, by output and part; what is not float, infinite or of another shape is left out."""
        found = {}
        for name, value in zip(self.names, given, strict=True):
            reference = wanted.get(name)
            if reference is None or not _comparable(reference, value):
                continue
            for part, (whole, other) in enumerate(zip(*self._parts(name, reference, value), strict=True)):
                found[name, part] = Closeness.of(whole, other)
        return found

    def _parts(self, name: str, *arrays: NDArray[Any]) -> list[list[NDArray[Any]]]:
        joint = self._joints.get(name)
        return [[array] if joint is None else joint.parts(array) for array in arrays]


def together(errors: Iterable[Errors]) -> Closeness:
    """Over all samples; of several parts the sum of their noise, each relative to its power."""
    total: dict[tuple[str, int], Closeness] = {}
    for some in errors:
        for key, close in some.items():
            total[key] = total.get(key, Closeness()).merge(close)
    if len(total) == 1:
        return next(iter(total.values()))
    shares = [close.noise / close.signal for close in total.values() if close.signal > 0]
    return Closeness(signal=float(len(shares)), noise=float(sum(shares)), count=len(shares))


def _comparable(wanted: Any, value: Any) -> bool:
    arrays = isinstance(wanted, np.ndarray) and isinstance(value, np.ndarray)
    return (
        arrays
        and wanted.dtype.kind == "f"
        and wanted.shape == value.shape
        and bool(np.isfinite(wanted).all())
    )
