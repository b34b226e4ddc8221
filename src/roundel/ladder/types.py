"""What a walk up the ladder finds."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundel.report.record import versions

if TYPE_CHECKING:
    from roundel.pipeline import QuantizeResult

LADDER_VERSION = 1


class Verdict(enum.Enum):
    """What became of a rung."""

    CHOSEN = "chosen"  # meets the budget
    BEST = "best"  # does not, and nothing else came closer
    MEETS = "meets"  # meets it, and a cheaper one does, too
    FAILS = "fails"
    SKIPPED = "skipped"
    STOPPED = "stopped"  # time was over, or its result was illegal


@dataclass(frozen=True, slots=True)
class Step:
    """One rung as it was walked.

    Attributes:
        rung: name.
        title: what it is.
        verdict: what became of it.
        reason: why it was skipped or stopped, or what it consists of.
        metric: on the held-out data; None where there is no model.
        drop: what was lost, in the unit of the budget.
        sqnr_db: of the outputs against the float model's.
        npu_share: share of the multiplications that the NPU is predicted to take.
        file_bytes: of the model.
        seconds: for making and judging it.
        changes: what differs from the preset, nested as in a recipe.
    """

    rung: str
    title: str
    verdict: Verdict
    reason: str = ""
    metric: float | None = None
    drop: float | None = None
    sqnr_db: float | None = None
    npu_share: float | None = None
    file_bytes: int | None = None
    seconds: float = 0.0
    preset: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; an infinite number becomes a string."""
        tree = {**asdict(self), "verdict": self.verdict.value}
        return {key: _plain(value) for key, value in tree.items()}


@dataclass(frozen=True, slots=True, eq=False)
class AutoResult:
    """The ladder and what it led to.

    Attributes:
        met: whether the budget holds for the model that was handed over.
        steps: the rungs, in the order of the walk.
        metric: name of what was measured.
        metric_words: what that means.
        reference: the float model's value.
        max_drop: the budget in words.
        judged_on: what the models were judged on.
        result: the winner, or the best that was found.
        path: where it was written; None when no output was asked for.
        seconds: the whole took.
        notes: what a careful reader wants to know.
    """

    met: bool
    steps: tuple[Step, ...]
    metric: str
    metric_words: str
    reference: float
    max_drop: str
    judged_on: str
    result: QuantizeResult
    path: Path | None
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> Step:
        """The rung whose model was handed over."""
        return next(s for s in self.steps if s.verdict in (Verdict.CHOSEN, Verdict.BEST))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "ladder_version": LADDER_VERSION,
            "versions": versions(),
            "met": self.met,
            "chosen": self.chosen.rung,
            "metric": self.metric,
            "metric_words": self.metric_words,
            "float": _plain(self.reference),
            "max_drop": self.max_drop,
            "judged_on": self.judged_on,
            "file": self.path.name if self.path else None,
            "seconds": self.seconds,
            "ladder": [step.to_dict() for step in self.steps],
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """Indented JSON text."""
        return json.dumps(self.to_dict(), indent=1) + "\n"


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
