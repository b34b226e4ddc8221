"""What a pass is: a small object with one job that says how often it did it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir


@dataclass(frozen=True, slots=True)
class PassReport:
    """What one pass did, and how long it took (shape refreshes it needed included)."""

    name: str
    rewrites: int
    seconds: float


class Pass(ABC):
    """A float-to-float rewrite of a model, in place.

    A pass changes only the main graph. It rewrites a place only after it has proved that no graph
    output and no other reader, captures inside If, Loop and Scan bodies included, can see a difference
    beyond the tolerance that its docstring states.

    Attributes:
        name: what reports call the pass.
        reads_shapes: whether it needs current shapes and types on the values.
    """

    name: ClassVar[str]
    reads_shapes: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, model: ir.Model) -> int:
        """Rewrite the model in place and return the number of rewrites."""
