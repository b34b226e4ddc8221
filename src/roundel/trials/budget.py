"""Budgets in words: what a model may lose, and how long the search for it may take."""

from __future__ import annotations

import enum
import math
import re
from dataclasses import dataclass

from roundel.errors import RecipeError
from roundel.measure.scores import Z

_DROP = re.compile(
    r"(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>%|percent|points?|pts?|pp|map)?", re.IGNORECASE
)
_FORMS = (
    "'1%' (of the float model's metric), '1 point' (of a hundred), '1map' (of mAP), or '0.01' (in the"
    " metric's own units)"
)
_TIME = re.compile(
    r"(?:(?P<h>\d+(?:\.\d+)?)\s*h)?\s*(?:(?P<m>\d+(?:\.\d+)?)\s*m(?:in)?)?\s*(?:(?P<s>\d+(?:\.\d+)?)\s*s?)?",
    re.IGNORECASE,
)


_SECONDS = {"h": 3600, "m": 60, "s": 1}


class DropUnit(enum.Enum):
    """What a drop is a part of."""

    RELATIVE = "%"  # of the float model's own metric
    POINT = "point"  # of a hundred: 75.3 % to 74.3 % is one
    MAP = "mAP"  # likewise, of the mean average precision of boxes
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
        if self.unit in (DropUnit.POINT, DropUnit.MAP):
            return 100 * lost
        if reference == 0:
            return 0.0 if lost == 0 else math.copysign(math.inf, lost)
        return 100 * lost / abs(reference)

    def allows(self, lost: float) -> bool:
        """Whether so much may be lost; rounding in the last place does not decide."""
        return lost <= self.amount + 1e-9 * max(1.0, self.amount)

    def probability(self, lost: float, margin: float | None) -> float | None:
        """That the loss on endless data is within this drop, where half of the 95 % interval is known."""
        if not margin:
            return None
        return 0.5 + math.erf((self.amount - lost) / margin * Z / math.sqrt(2)) / 2

    def words(self, lost: float) -> str:
        """A loss in this unit."""
        if self.unit is DropUnit.PLAIN:
            return f"{lost:.4g}"
        return f"{lost:.2f}" + ("%" if self.unit is DropUnit.RELATIVE else "pt")

    def __str__(self) -> str:
        if self.unit is DropUnit.POINT:
            return f"{self.amount:g} point" + ("" if self.amount == 1 else "s")
        if self.unit is DropUnit.MAP:
            return f"{self.amount:g} mAP"
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
    if unit == "map":
        return Drop(amount, DropUnit.MAP)
    return Drop(amount, DropUnit.POINT if unit else DropUnit.PLAIN)


def parse_time(text: str | float | None) -> float | None:
    """Seconds; None for no limit.

    Raises:
        RecipeError: the words are no time.
    """
    if text is None:
        return None
    found = _TIME.fullmatch(str(text).strip())
    parts = {} if found is None else found.groupdict("0")
    seconds = sum(float(value) * _SECONDS[unit] for unit, value in parts.items())
    if seconds <= 0:
        raise RecipeError(
            "The time cannot be read.", where="--time", observed=text, expected="10m, 90s, 1h30m or 600"
        )
    return seconds
