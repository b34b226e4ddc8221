"""What a report is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roundel.check.types import CheckReport
    from roundel.compare.types import Comparison

Tree = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReportContent:
    """Everything that is known about a quantized model.

    Attributes:
        comparison: tensor by tensor against the float model.
        record: of the run that wrote it, as in its JSON file; None for a model of unknown origin.
        check: the predicted split between NPU and CPU.
        unchecked: why there is no prediction.
        scores: float and quantized model on labelled data, as `ModelScore.to_dict` has them.
    """

    comparison: Comparison
    record: Tree | None = None
    check: CheckReport | None = None
    unchecked: str | None = None
    scores: Sequence[Tree] = field(default=())
