"""The rungs: from the format that runs fastest on the NPU to the one that loses least, then fine-tuning."""

from __future__ import annotations

import enum
import importlib.util
import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundel.errors import RecipeError
from roundel.measure.layers import LayerCost
from roundel.plain import Card, counted, to_plain
from roundel.recipe.settings import merge
from roundel.report.record import versions
from roundel.targets.npu import Format, device_named
from roundel.trials.budget import Drop

if TYPE_CHECKING:
    from roundel.result import QuantizeResult


@dataclass(frozen=True, slots=True)
class Rung:
    """One try.

    Attributes:
        name: as the table and the options say it.
        title: what it is.
        preset: the recipe it starts from.
        format: what the NPU must take.
        family: rungs of one family prepare the model alike, so that they share statistics.
        work: about how many float passes over the calibration data it takes.
        torch: whether it learns by gradients.
        mixed: whether layers of it are widened one after the other.
    """

    name: str
    title: str
    preset: str
    format: Format
    family: str
    work: float
    torch: bool = False
    mixed: bool = False


RUNGS: tuple[Rung, ...] = (
    Rung("xint8", "XINT8, effort fast", "xint8", Format.XINT8, "xint8", 25),
    Rung("a8w8", "A8W8, effort fast", "a8w8", Format.A8W8, "float", 25),
    Rung("a16w8", "A16W8, effort fast", "a16w8", Format.A16W8, "float", 25),
    Rung("mixed", "A8W8, worst layers in A16W8", "a8w8", Format.A16W8, "float", 30, mixed=True),
    Rung("bf16", "BF16", "bf16", Format.BF16, "bf16", 5),
    # Last, for they take minutes; where XINT8 came close it may still win, for it runs fastest.
    Rung("xint8-adaround", "XINT8, AdaRound", "xint8_adaround", Format.XINT8, "xint8", 120, torch=True),
    Rung("xint8-adaquant", "XINT8, AdaQuant", "xint8_adaquant", Format.XINT8, "xint8", 120, torch=True),
)


def chosen_rungs(names: Sequence[str] | None) -> tuple[Rung, ...]:
    """The rungs that a user names, in the ladder's order; all when none are named.

    Raises:
        RecipeError: there is no such rung.
    """
    if names is None:
        return RUNGS
    known = [rung.name for rung in RUNGS]
    wanted = [name.strip().casefold().replace("_", "-") for name in names]
    for name in wanted:
        if name not in known:
            raise RecipeError.unknown(f"There is no rung '{name}'.", name, known, where="--rungs")
    if not wanted:
        raise RecipeError("No rung was named.", where="--rungs", expected=", ".join(known))
    return tuple(rung for rung in RUNGS if rung.name in wanted)


def out_of_reach(rungs: Iterable[Rung], device: str | None) -> dict[str, str]:
    """Why a rung cannot be tried, by name.

    Raises:
        RecipeError: there is no such device.
    """
    machine = None if device is None else device_named(device)
    has_torch = importlib.util.find_spec("torch") is not None
    reasons = {}
    for rung in rungs:
        if machine is not None and rung.format not in machine.formats:
            formats = machine.formats - {Format.FLOAT}
            taken = ", ".join(f.value.upper() for f in Format if f in formats)
            reasons[rung.name] = f"{machine.name} takes {taken} only"
        elif rung.torch and not has_torch:
            reasons[rung.name] = "torch is not installed (pip install 'roundel[torch]')"
    return reasons


_SHARES = (0.5, 0.8, 0.95, 0.99)  # of what all activations cost; a few tries, each more than the last
_WIDE = "int16"


@dataclass(frozen=True, slots=True)
class Mixture:
    """Some layers in A16W8, the rest as the recipe has them.

    Attributes:
        layers: how many.
        of: how many there are.
        changes: to the recipe.
    """

    layers: int
    of: int
    changes: dict[str, Any]


def grown(layers: Sequence[LayerCost], changes: Mapping[str, Any]) -> Iterator[Mixture]:
    """Growing sets of the most costly layers, from the costs of their activations."""
    moving = [layer for layer in layers if layer.activations > 0]
    ranked = sorted(moving, key=lambda layer: -layer.activations)
    reached, before = list(accumulate(layer.activations for layer in ranked)), 0
    for share in _SHARES if ranked else ():
        count = min(bisect_left(reached, share * reached[-1]) + 1, len(ranked))
        if count > before:
            nodes = [name for layer in ranked[:count] for name in layer.nodes]
            own = list(changes.get("overrides", ()))
            override = {"overrides": [*own, {"nodes": nodes, "type": _WIDE}]}
            yield Mixture(count, len(layers), merge(dict(changes), override))
        before = max(before, count)


LADDER_VERSION = 1
LIKELY = 0.8  # the probability from which a rung is taken though its interval leaves a doubt


class RungVerdict(enum.Enum):
    """What became of a rung."""

    CHOSEN = "chosen"  # meets the budget, or is likely to
    BEST = "best"  # does not, or is not likely to, and nothing else came closer
    MEETS = "meets"  # meets it with all of its interval, and a cheaper one was chosen
    UNDECIDED = "undecided"  # the budget lies within its interval
    FAILS = "fails"  # with all of its interval
    SKIPPED = "skipped"
    STOPPED = "stopped"  # time was over, or its result was illegal

    @classmethod
    def of(cls, budget: Drop, lost: float, margin: float | None) -> RungVerdict:
        """What a measured loss says, with half of its interval where that is known."""
        if budget.allows(lost + (margin or 0.0)):
            return cls.MEETS
        return cls.UNDECIDED if margin and budget.allows(lost - margin) else cls.FAILS


@dataclass(frozen=True, slots=True)
class RungStep:
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
        forecast: seconds that were expected of it.
        margin: half of the drop's 95 % interval, in the unit of the budget; None where it is not known.
        probability: that the drop is within the budget on endless data of this kind; None likewise.
        changes: what differs from the preset, nested as in a recipe.
    """

    rung: str
    title: str
    verdict: RungVerdict
    reason: str = ""
    metric: float | None = None
    drop: float | None = None
    sqnr_db: float | None = None
    npu_share: float | None = None
    file_bytes: int | None = None
    seconds: float = 0.0
    forecast: float | None = None
    margin: float | None = None
    probability: float | None = None
    preset: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, rung: Rung, verdict: RungVerdict, reason: str = "", **figures: Any) -> RungStep:
        """A rung as it ended."""
        return cls(rung.name, rung.title, verdict, reason, preset=rung.preset, **figures)

    @property
    def likely(self) -> bool:
        """Whether it meets the budget, as far as can be told: a slower format is then not needed."""
        sure = self.verdict in (RungVerdict.MEETS, RungVerdict.CHOSEN)
        return sure or (self.probability is not None and self.probability >= LIKELY)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; an infinite number becomes a string."""
        return dict(to_plain(self))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class AutoResult(Card):
    """The ladder and what it led to.

    Attributes:
        met: whether the measured drop of the model that was handed over is within the budget; where chance
            leaves a doubt, `chosen.probability` says how large.
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
        rows_to_tell: about so many rows would decide what these leave open; None where nothing is.
    """

    met: bool
    steps: tuple[RungStep, ...]
    metric: str
    metric_words: str
    reference: float
    max_drop: str
    judged_on: str
    result: QuantizeResult
    path: Path | None
    seconds: float
    notes: tuple[str, ...] = ()
    rows_to_tell: int | None = None

    @property
    def chosen(self) -> RungStep:
        """The rung whose model was handed over."""
        return next(s for s in self.steps if s.verdict in (RungVerdict.CHOSEN, RungVerdict.BEST))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "ladder_version": LADDER_VERSION,
            "versions": versions(),
            "met": self.met,
            "probability": self.chosen.probability,
            "rows_to_tell": self.rows_to_tell,
            "chosen": self.chosen.rung,
            "metric": self.metric,
            "metric_words": self.metric_words,
            "float": to_plain(self.reference),
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

    def card(self) -> Mapping[str, object]:
        """The main figures."""
        tried = sum(step.metric is not None for step in self.steps)
        return {
            "chosen": f"{self.chosen.rung}, {'within' if self.met else 'beyond'} {self.max_drop}",
            self.metric: f"{self.chosen.metric:.6g}, float {self.reference:.6g}, on {self.judged_on}",
            "tried": f"{tried} of {counted(len(self.steps), 'rung')} in {self.seconds:.0f} s",
            "file": self.path or "none",
        }


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
        # The nearest rung in work says most: what a thread or a core is worth differs from step to step.
        nearest = min(self._seen, key=lambda pair: abs(pair[0] - rung.work), default=(0.0, 1.0))
        return self._expected(rung) * nearest[1]

    def learn(self, rung: Rung, seconds: float) -> None:
        """A rung has taken so long."""
        self._seen.append((rung.work, seconds / self._expected(rung)))

    def _expected(self, rung: Rung) -> float:
        return _START + rung.work * self.forward + 2 * self.judging
