"""How far a model's outputs are off, all of which count alike.

Boxes in pixels and scores between 0 and 1 differ in power by millions: summed up as they are, nobody would
notice what becomes of the scores. So each output counts relative to its own power, and so does each part of
one that a detection head has joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from roundel.numerics.metrics import Closeness, comparable
from roundel.plan.detection_head import joined_outputs, paired_parts

Errors = Mapping[str, Closeness]


class OutputErrors:
    """The errors of one model's outputs."""

    def __init__(self, graph: ir.Graph) -> None:
        self.names = [str(value.name) for value in graph.outputs]
        self._joints = joined_outputs(graph)

    def of(self, wanted: Mapping[str, NDArray[Any]], given: Sequence[NDArray[Any]]) -> Errors:
        """For one sample, by output and part; what is not float, infinite or of another shape is left out."""
        found = {}
        for name, value in zip(self.names, given, strict=True):
            if comparable(wanted.get(name), value):
                for part, whole, other in paired_parts(name, wanted[name], value, self._joints):
                    found[part] = Closeness.of(whole, other)
        return found


def together(errors: Iterable[Errors]) -> Closeness:
    """Over all samples; of several parts the sum of their noise, each relative to its power."""
    total: dict[str, Closeness] = {}
    for some in errors:
        for key, close in some.items():
            total[key] = total.get(key, Closeness()).merge(close)
    if len(total) == 1:
        return next(iter(total.values()))
    shares = [close.noise / close.signal for close in total.values() if close.signal > 0]
    return Closeness(signal=float(len(shares)), noise=float(sum(shares)), count=len(shares))
