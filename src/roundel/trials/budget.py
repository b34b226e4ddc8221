"""How much may be lost, and how long it may take, in words."""

from __future__ import annotations

import enum
import math
import re
from dataclasses import dataclass, field

from roundel.errors import RecipeError
from roundel.trials.rungs import Rung

_DROP = re.compile(r"(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>%|percent|points?|pts?|pp)?", re.IGNORECASE)
_FORMS = "'1%' (of the float model's metric), '1 point' (of a hundred), or '0.01' (in the metric's own units)"
_TIME = re.compile(
    r"(?:(?P<h>\d+(?:\.\d+)?)\s*h)?\s*(?:(?P<m>\d+(?:\.\d+)?)\s*m(?:in)?)?\s*(?:(?P<s>\d+(?:\.\d+)?)\s*s?)?",
    re.IGNORECASE,
)


class DropUnit(enum.Enum):
    """What a drop is a part of."""

    RELATIVE = "%"  # of the float model's own metric
    POINT = "point"  # of a hundred: 75.3 % to 74.3 % is one
    PLAIN = ""  # of the metric's own units


@dataclass(frozen=True, slots=True)
class Drop:
    """The most that a metric may lose."""

    amount: float
    unit: DropUnit

    def of(self, reference: float, value: float, *, lower: bool = False) -> float:
        """What was lost, in this drop's unit; negative where the value is better than the reference.

        Args:
            reference: the float model's metric.
            value: the quantized model's.
            lower: whether less is better.
        """
        lost = value - reference if lower else reference - value
        if self.unit is DropUnit.PLAIN:
            return lost
        if self.unit is DropUnit.POINT:
            return 100 * lost
        if reference == 0:
            return 0.0 if lost == 0 else math.copysign(math.inf, lost)
        return 100 * lost / abs(reference)

    def allows(self, lost: float) -> bool:
        """Whether so much may be lost; rounding in the last place does not decide."""
        return lost <= self.amount + 1e-9 * max(1.0, self.amount)

    def words(self, lost: float) -> str:
        """A loss in this unit."""
        if self.unit is DropUnit.PLAIN:
            return f"{lost:.4g}"
        return f"{lost:.2f}" + ("%" if self.unit is DropUnit.RELATIVE else "pt")

    def __str__(self) -> str:
        if self.unit is DropUnit.POINT:
            return f"{self.amount:g} point" + ("" if self.amount == 1 else "s")
        return f"{self.amount:g}{self.unit.value}"


def parse_drop(text: str | float) -> Drop:
    """The drop that a user means.

    Raises:
        RecipeError: the words mean none.
    """
    found = _DROP.fullmatch(str(text).strip())
    if found is None:
        raise RecipeError(
            "The largest drop cannot be read.", where="--max-drop", observed=text, expected=_FORMS
        )
    amount, unit = float(found["number"]), (found["unit"] or "").casefold()
    if unit in ("%", "percent"):
        return Drop(amount, DropUnit.RELATIVE)
    return Drop(amount, DropUnit.POINT if unit else DropUnit.PLAIN)


def parse_time(text: str | float | None) -> float | None:
    """Seconds; None for no limit.

    Raises:
        RecipeError: the words are no time.
    """
    if text is None:
        return None
    words = str(text).strip()
    found = _TIME.fullmatch(words) if words else None
    parts = {key: float(value) for key, value in found.groupdict().items() if value} if found else {}
    seconds = sum(parts.get(key, 0.0) * size for key, size in (("h", 3600), ("m", 60), ("s", 1)))
    if seconds <= 0:
        raise RecipeError(
            "The time cannot be read.", where="--time", observed=text, expected="10m, 90s, 1h30m or 600"
        )
    return seconds


_START = 1.0  # seconds for sessions and files, whatever the model


@dataclass(slots=True)
class RungForecast:
    """What a rung will take, from one float pass over the data and from the rungs before.

    Attributes:
        forward: seconds of the float model over the calibration data.
        judging: seconds of the float model over the held-out data.
    """

    forward: float
    judging: float
    _seen: list[tuple[float, float]] = field(default_factory=list)

    def seconds(self, rung: Rung) -> float:
        """Of making and judging it."""
        expected = self._expected(rung)
        if not self._seen:
            return expected
        # The nearest rung in work says most: what a thread or a core is worth differs from step to step.
        nearest = min(self._seen, key=lambda pair: abs(pair[0] - rung.work))
        return expected * nearest[1]

    def learn(self, rung: Rung, seconds: float) -> None:
        """A rung has taken so long."""
        self._seen.append((rung.work, seconds / self._expected(rung)))

    def _expected(self, rung: Rung) -> float:
        return _START + rung.work * self.forward + 2 * self.judging
