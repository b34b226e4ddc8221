"""What data shows about itself and beside other data: samples that say nothing or the same, noise, scales.

One `SampleWatch` sees every sample as it passes on its way to the model. It costs a fraction of the forward
pass and keeps a few numbers for each sample.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from roundel.data.arrays import is_float
from roundel.data.images import plan_images
from roundel.errors import DataError
from roundel.plain import from_plain, listed
from roundel.recipe.load import known_recipe, read_record
from roundel.types import Array, Doubles, Sample

if TYPE_CHECKING:
    from roundel.data.samples import Samples

Level = Literal["warning", "note"]

_FEWEST_FOR_NOISE = 4
_NOISE_CORRELATION = 0.1  # neighbours in pictures correlate at 0.8 and more, in noise at about 0
_LEAST_SIDE = 8
_LOOKED_AT = 64  # side of the middle part in which neighbours are compared
_HASHED = 1 << 16  # elements; of larger arrays every n-th is hashed
_DUPLICATES = 0.05
_COLOURS = (1, 3, 4)
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class DataFinding:
    """One thing that is odd about the data.

    Attributes:
        rule: a short name for it.
        message: what was seen, in one sentence.
        hint: what to do about it.
        level: warning (the calibration is likely to suffer) or note.
    """

    rule: str
    message: str
    hint: str = ""
    level: Level = "warning"

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


@dataclass(frozen=True, slots=True)
class Profile:
    """The values of one input over all samples.

    Attributes:
        samples: how many.
        mean: of each channel (of the whole, for inputs without colour channels).
        std: likewise.
        low: smallest value.
        high: largest value.
    """

    samples: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    low: float
    high: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, of which `from_plain` makes a profile again."""
        shown = {name: [round(value, 6) for value in getattr(self, name)] for name in ("mean", "std")}
        return {**asdict(self), **shown}


_POINT = 1074  # binary places of the smallest float64: sums of whole numbers of these units are exact


def _exact(values: Doubles) -> list[int]:
    """Numbers in units of 2**-1074, without rounding."""
    ratios = (value.as_integer_ratio() for value in values.tolist())
    return [top << (_POINT + 1 - bottom.bit_length()) for top, bottom in ratios]


@dataclass(slots=True, eq=False)
class _Totals:
    """Exact sums over samples with one number of channels: the order of the samples does not count."""

    total: list[int]
    squares: list[int]
    count: int = 0
    samples: int = 0

    def merge(self, more: _Totals) -> None:
        self.total = [a + b for a, b in zip(self.total, more.total, strict=True)]
        self.squares = [a + b for a, b in zip(self.squares, more.squares, strict=True)]
        self.count, self.samples = self.count + more.count, self.samples + more.samples


@dataclass(slots=True, eq=False)
class _Sums:
    """Sums over the samples of one input, by channel: the same to the bit, whoever has seen which sample."""

    low: float = math.inf
    high: float = -math.inf
    totals: dict[int, _Totals] = field(default_factory=dict)
    """By the number of channels; the first sample's is what counts."""

    @staticmethod
    def of(array: Array, low: float, high: float) -> _Sums:
        values = by_channel(array)
        total = values.sum(axis=1, dtype=np.float64)
        squares = np.einsum("cn,cn->c", values, values, dtype=np.float64, casting="same_kind")
        return _Sums(low, high, {len(total): _Totals(_exact(total), _exact(squares), values.shape[1], 1)})

    def merge(self, other: _Sums) -> None:
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        for size, totals in other.totals.items():
            if size in self.totals:
                self.totals[size].merge(totals)
            else:
                self.totals[size] = replace(totals)

    def profile(self) -> Profile:
        first = next(iter(self.totals.values()))
        unit = first.count << _POINT
        mean = np.array([total / unit for total in first.total])
        power = np.array([squares / unit for squares in first.squares])
        std = np.sqrt(np.maximum(power - mean**2, 0.0))
        return Profile(first.samples, tuple(mean.tolist()), tuple(std.tolist()), self.low, self.high)


@dataclass(slots=True, eq=False)
class SampleWatch:
    """Looks at samples while they pass by; what it has seen travels by `to_plain` and `from_plain`.

    Attributes:
        count: samples seen.
        constant: for each input the places of samples that hold one value only.
        digests: of each sample.
        neighbours: for each input how much neighbouring values of each picture are alike.
        sums: for each float input.
    """

    count: int = 0
    constant: dict[str, list[int]] = field(default_factory=dict)
    digests: list[str] = field(default_factory=list)
    neighbours: dict[str, list[float]] = field(default_factory=dict)
    sums: dict[str, _Sums] = field(default_factory=dict)

    def merge(self, other: SampleWatch) -> None:
        """Add what was seen of the samples behind these."""
        for name, where in other.constant.items():
            self.constant.setdefault(name, []).extend(self.count + place for place in where)
        for name, values in other.neighbours.items():
            self.neighbours.setdefault(name, []).extend(values)
        for name, sums in other.sums.items():
            self.sums.setdefault(name, _Sums()).merge(sums)
        self.digests += other.digests
        self.count += other.count

    def watch(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """The same samples, each looked at before it is handed on."""
        for sample in samples:
            self.look(sample)
            yield sample

    def look(self, sample: Sample) -> None:
        """Take in one sample."""
        digest = hashlib.blake2b(digest_size=16)
        for name, array in sorted(sample.items()):
            step = max(1, array.size // _HASHED)
            if array.dtype.kind in "fiub":
                digest.update(array.reshape(-1)[::step].tobytes())
            if not is_float(array.dtype) or array.size <= 1:
                continue
            low, high = float(array.min()), float(array.max())
            if low == high:
                self.constant.setdefault(name, []).append(self.count)
            self.sums.setdefault(name, _Sums()).merge(_Sums.of(array, low, high))
            correlation = _neighbour_correlation(array)
            if correlation is not None:
                self.neighbours.setdefault(name, []).append(correlation)
        self.digests.append(digest.hexdigest())
        self.count += 1

    @property
    def profiles(self) -> dict[str, Profile]:
        """The values of each float input."""
        return {name: sums.profile() for name, sums in self.sums.items()}

    def findings(self) -> Iterator[DataFinding]:
        """What is odd about the samples themselves."""
        for name, where in self.constant.items():
            yield DataFinding(
                "constant-samples",
                f"{len(where)} of {self.count} samples of input '{name}' hold one value only"
                f" (samples {listed(where, _SHOWN)}).",
                "Remove them: they widen no range, and fine-tuning learns nothing from them.",
            )
        copies = sum(count - 1 for count in Counter(self.digests).values())
        if self.count > 1 and copies > _DUPLICATES * self.count:
            yield DataFinding(
                "duplicate-samples",
                f"{copies} of {self.count} samples are copies of others.",
                "Use different samples: copies cost time and add nothing.",
            )
        for name, values in self.neighbours.items():
            if len(values) >= _FEWEST_FOR_NOISE and float(np.median(values)) < _NOISE_CORRELATION:
                yield DataFinding(
                    "random-samples",
                    f"Input '{name}' looks like random noise: neighbouring values are not alike"
                    f" (correlation {float(np.median(values)):.2f}; pictures have 0.8 and more).",
                    "Calibrate on real data: ranges from noise mean nothing for real inputs.",
                )


def colour_axis(shape: Sequence[int]) -> int | None:
    """Where a picture has its colours, None for an array that is no picture."""
    if len(shape) != 4:
        return None
    for axis, sides in ((1, shape[2:]), (3, shape[1:3])):
        if shape[axis] in _COLOURS and min(sides) >= _LEAST_SIDE:
            return axis
    return None


def by_channel(array: Array) -> Array:
    """(channels, values): the colours of a picture, or one row of everything."""
    axis = colour_axis(array.shape)
    if axis is None:
        return array.reshape(1, -1)
    return np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)


def _neighbour_correlation(array: Array) -> float | None:
    """Correlation of values side by side, in the middle of the first picture; None where there is none."""
    axis = colour_axis(array.shape)
    if axis is None:
        return None
    plane = np.moveaxis(array, axis, 1)[0, 0]
    top, left = (max(0, (side - _LOOKED_AT) // 2) for side in plane.shape)
    part = plane[top : top + _LOOKED_AT, left : left + _LOOKED_AT].astype(np.float64)
    part = part - part.mean()
    power = float(np.square(part).mean())
    if power == 0:
        return None
    across = float((part[:, 1:] * part[:, :-1]).mean()) / power
    down = float((part[1:] * part[:-1]).mean()) / power
    return max(across, down)


_FEW, _MANY = 16, 64
_STILL_GROWING = 0.12
_ENOUGH = 0.98
_STEPS = tuple(2**k for k in range(3, 20))

Extremes = Mapping[str, tuple[Sequence[float], Sequence[float]]]


def coverage(extremes: Extremes, count: int) -> float:
    """How much of the ranges a random choice of so many samples reaches, on average over tensors.

    The average over all choices has a closed form, so that the order of the samples does not matter.

    Args:
        extremes: for each tensor the smallest and the largest value of each sample.
        count: samples to choose.
    """
    shares = []
    for lows, highs in extremes.values():
        sizes = np.sort(np.maximum(np.abs(lows), np.abs(highs)))[::-1]
        if len(sizes) >= count and sizes[0] > 0:
            shares.append(float(sizes @ _weights(len(sizes), count)) / sizes[0])
    return float(np.mean(shares)) if shares else 1.0


def range_findings(extremes: Extremes) -> Iterator[DataFinding]:
    """Too few samples, or more than needed."""
    total = max((len(lows) for lows, _ in extremes.values()), default=0)
    growth = 1 - coverage(extremes, total // 2) if total > 1 else None
    if growth is not None and (total < _FEW or growth > _STILL_GROWING):
        yield DataFinding(
            "few-samples",
            f"{total} samples: half of them reach {1 - growth:.0%} of the ranges on average, so that more"
            " are likely to widen them.",
            "Use 64 or more.",
            "warning" if growth > _STILL_GROWING or total < _FEW // 2 else "note",
        )
        return
    if total == 1:
        yield DataFinding("few-samples", "There is one sample only.", "Use 64 or more.")
    enough = next((n for n in _STEPS if n <= total // 2 and coverage(extremes, n) >= _ENOUGH), None)
    if enough is not None and total >= _MANY:
        yield DataFinding(
            "more-than-needed",
            f"{enough} of the {total} samples would have done: they reach {coverage(extremes, enough):.0%}"
            " of the ranges.",
            level="note",
        )


def _weights(total: int, count: int) -> Doubles:
    """The chance that the k-th largest is the largest of `count` out of `total`."""
    whole = math.comb(total, count)
    chances = [
        math.comb(total - k - 1, count - 1) / whole if total - k >= count else 0.0 for k in range(total)
    ]
    return np.array(chances)


_FEWEST = 8
_SHIFT, _SHIFT_OF_FEW = 0.35, 1.5  # of a standard deviation; the mean of a few pictures varies
_WIDER = 1.7


def difference_findings(
    calibration: Mapping[str, Profile], other: Mapping[str, Profile], what: str = "evaluation data"
) -> Iterator[DataFinding]:
    """Inputs whose values are not alike in both.

    Args:
        calibration: profiles by input.
        other: likewise.
        what: the other data, in words.
    """
    for name, ours in calibration.items():
        theirs = other.get(name)
        if theirs is None or min(ours.samples, theirs.samples) < _FEWEST:
            continue
        if len(ours.mean) == len(theirs.mean) and _differ(ours, theirs):
            yield DataFinding(
                "different-preprocessing",
                f"Input '{name}' has mean {_words(ours.mean)} and standard deviation {_words(ours.std)} in"
                f" the calibration data, and {_words(theirs.mean)} and {_words(theirs.std)} in the {what}.",
                "Preprocess both alike.",
            )


def preprocessing_finding(
    calibration: object, other: object, what: str = "evaluation data"
) -> DataFinding | None:
    """Image folders whose recorded preprocessing differs, whatever the values."""
    if not calibration or not other or calibration == other:
        return None
    return DataFinding(
        "different-preprocessing",
        f"Calibration images were preprocessed as '{calibration}', the {what} as '{other}'.",
        "Preprocess both alike.",
    )


def record_findings(model: Path | None, samples: Samples) -> list[DataFinding]:
    """Whether data looks like that which a model was calibrated on, by the record beside the model.

    Args:
        model: the quantized model's file; None for one in memory, which has no record.
        samples: the data at hand, after a pass over it.
    """
    record = read_record(model)
    if record is None or samples.description.get("random"):
        return []
    try:
        facts = record["data"]
        profiles = {name: from_plain(Profile, tree) for name, tree in facts.get("inputs", {}).items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return []  # another file of that name
    if facts.get("random"):
        return []
    here = samples.description
    if _prepared_alike(record, samples):
        return []  # what still differs is what the pictures show
    words = preprocessing_finding(facts.get("preprocessing"), here.get("preprocessing"), "data")
    return list(difference_findings(profiles, samples.profiles, "data")) if words is None else [words]


def _prepared_alike(record: Mapping[str, Any], samples: Samples) -> bool:
    """Whether the images at hand become what those of the run became; False where that cannot be told."""
    recipe = known_recipe(record)
    if recipe is None or samples.images is None:
        return False
    try:
        return plan_images(recipe.data, samples.inputs).does_as(samples.images[1])
    except DataError:  # of another input size, say
        return False


def _differ(ours: Profile, theirs: Profile) -> bool:
    few = min(ours.samples, theirs.samples)
    allowed = _SHIFT + _SHIFT_OF_FEW / math.sqrt(few)
    for mean, other_mean, std, other_std in zip(ours.mean, theirs.mean, ours.std, theirs.std, strict=True):
        narrow, wide = min(std, other_std), max(std, other_std)
        if wide > _WIDER * narrow or abs(mean - other_mean) > allowed * max(wide, 1e-12):
            return True
    return False


def _words(values: tuple[float, ...]) -> str:
    return "/".join(f"{value:.3g}" for value in values)
