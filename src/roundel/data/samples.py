"""Calibration samples as the rest of Roundel sees them: checked, one at a time, and described."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roundel.data import arrays
from roundel.data.lint import DataFinding, Profile, SampleWatch
from roundel.errors import DataError, RoundelError
from roundel.types import Array, InputSpec, Sample

if TYPE_CHECKING:
    from roundel.data.images import ImagePlan


Reader = Callable[[Path], Any]


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that a source yields, and the file it came from."""

    value: object
    origin: str | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """Where samples come from, before anything is checked.

    Args:
        kind: what it is, in words for the record.
        items: starts a new pass over the data.
        count: number of items, when known.
        rows: number of rows over all items, when known.
        repeatable: whether `items` may be called more than once.
        facts: further lines of the record (path, preprocessing, ...).
        files: the folder, its files and how one is read, where each item is a file that workers could read.
        images: the folder, and how an image becomes model input, where each item is an image file in it.
    """

    kind: str
    items: Callable[[], Generator[Item, None, None]]
    count: int | None = None
    rows: int | None = None
    repeatable: bool = True
    facts: Mapping[str, object] = field(default_factory=dict)
    files: tuple[Path, Sequence[Path], Reader] | None = None
    images: tuple[Path, ImagePlan] | None = None


class Samples:
    """Calibration samples, each a dict from input name to an array that the model accepts.

    One sample is one run of the model: where the model fixes its batch size, the rows of the data are cut and
    joined to that size (an incomplete last batch is dropped and noted); where it leaves it open, each array
    is fed as it came. Only one sample is in memory at a time. Iterate as often as the source allows; a source
    that can be read only once raises a `DataError` at the second pass.

    Args:
        source: where the data come from.
        inputs: what the model takes.
        limit: the largest number of samples to yield.
        plan: how raw pixels in the data become model input; None when the data are model input already.
        first: the position of the first sample, for messages, where these are a part of some data.

    Attributes:
        inputs: what the model takes, and every sample fits.
        repeatable: whether a second pass is possible.
        watch: what was seen in the last pass.
        ignored: told of arrays in the data that no input needs, since it has become a constant.
    """

    def __init__(
        self,
        source: Source,
        inputs: Sequence[InputSpec],
        *,
        limit: int | None = None,
        plan: ImagePlan | None = None,
        first: int = 0,
    ) -> None:
        if limit is not None and limit < 1:
            raise DataError("The sample limit is too small", observed=limit, expected="1 or more")
        self._source, self.repeatable = source, source.repeatable
        self.inputs = tuple(inputs)
        self._limit = limit
        self._plan = plan
        self._first = first
        self._free_batch = arrays.fixed_batch(inputs) is not None
        self._started = False
        self._ahead: Iterator[Sample] | None = None
        self._seen: int | None = None
        self.watch = SampleWatch()
        self._notes: dict[str, None] = {}
        self.ignored: dict[str, None] = {}

    @property
    def count(self) -> int | None:
        """How many samples a pass yields: exact after one pass, before it what the source says, or None."""
        if self._seen is not None:
            return self._seen
        batch = arrays.fixed_batch(self.inputs)
        known = self._source.count
        if batch is not None:
            known = None if self._source.rows is None else self._source.rows // batch
        if known is None:
            return None
        return known if self._limit is None else min(known, self._limit)

    @property
    def description(self) -> dict[str, object]:
        """What the record says about the data; complete once a pass has ended."""
        told: dict[str, object] = {"kind": self._source.kind, **self._source.facts}
        if self._plan is not None:
            told["preprocessing"] = self._plan.describe()
        told.update(count=self.count, limit=self._limit)
        told.setdefault("random", False)
        told["inputs"] = {name: profile.to_dict() for name, profile in self.profiles.items()}
        told["notes"] = list(self._notes)
        return told

    @property
    def images(self) -> tuple[Path, ImagePlan] | None:
        """The folder, and how an image becomes model input, where each item is an image file in it."""
        return self._source.images

    @property
    def profiles(self) -> dict[str, Profile]:
        """The values of each float input, in the last pass."""
        return self.watch.profiles

    @property
    def findings(self) -> list[DataFinding]:
        """What is odd about the samples of the last pass; nothing, for random ones."""
        return [] if self._source.facts.get("random") else list(self.watch.findings())

    @property
    def notes(self) -> list[str]:
        """What was noted about the samples."""
        return list(self._notes)

    @property
    def division(self) -> Division | None:
        """The same samples as files that workers can read; None where a file is not always one sample."""
        batch, source = arrays.fixed_batch(self.inputs), self._source
        if source.files is None or (batch is not None and (batch != 1 or source.rows != source.count)):
            return None
        folder, files, read = source.files
        return Division(source.kind, folder, files[: self._limit], read, self.inputs)

    def adopt(self, watch: SampleWatch, seen: int, notes: Iterable[str]) -> None:
        """Take over what workers saw in a pass of theirs."""
        self._started, self._ahead = True, None
        self.watch, self._seen = watch, seen
        self._notes |= dict.fromkeys(notes)

    def first(self, count: int) -> list[Sample]:
        """Copies of the first samples; the next pass yields them again, also where the data is read once."""
        passing = iter(self)
        head = [
            {name: array.copy() for name, array in sample.items()}
            for sample in itertools.islice(passing, count)
        ]
        self._ahead = itertools.chain(head, passing)
        return head

    def __iter__(self) -> Iterator[Sample]:
        if self._ahead is not None:
            passing, self._ahead = self._ahead, None
            return passing
        self._start()
        return self._pass()

    def _start(self) -> None:
        if self._started and not self.repeatable:
            raise DataError(
                "The calibration data can be read only once, and were read already",
                where=self._source.kind,
                hint="Pass a list, a folder, or a reader with a rewind() method.",
            )
        self._started = True

    def _pass(self) -> Iterator[Sample]:
        groups = arrays.Regrouper(self.inputs)
        produced, watch = 0, SampleWatch()
        self.watch = watch
        with closing(self._items()) as items:
            for where, item in items:
                for sample in groups.push(self._fit(item.value, where), where):
                    produced += 1
                    watch.look(sample)
                    if produced == self._limit:
                        self._seen = produced
                    yield sample
                    # Return before the source is asked again: a generator must not lose an item to a limit.
                    if produced == self._limit:
                        return
        self._seen = produced
        if groups.leftover:
            self._notes[f"{groups.leftover} leftover rows dropped: the model's batch is {groups.size}"] = None
        if not produced:
            raise self._empty(groups)

    def named(self) -> Generator[tuple[str, Sample], None, None]:
        """One item of the source at a time, each with its file, or its position where it has none.

        Unlike a pass over the samples, nothing is dropped or joined: the rows of an item may be more or
        fewer than the model's batch.
        """
        self._start()
        count, watch = 0, SampleWatch()
        self.watch = watch
        with closing(self._items()) as items:
            for where, item in items:
                sample = self._fit(item.value, where)
                watch.look(sample)
                yield item.origin or str(count), sample
                count += 1
                if count == self._limit:
                    break
        self._seen = count
        if not count:
            raise self._empty(arrays.Regrouper(self.inputs))

    def _items(self) -> Generator[tuple[str, Item], None, None]:
        index = self._first
        with closing(self._source.items()) as items:
            while True:
                try:
                    item = next(items)
                except StopIteration:
                    return
                except RoundelError:
                    raise
                except Exception as error:
                    # Deliberately broad: the user's own code runs here and may raise anything.
                    raise DataError(
                        "The calibration data source failed",
                        where=f"sample {index} of {self._source.kind}",
                        observed=f"{type(error).__name__}: {error}",
                        hint="The traceback of the source follows; the fault is in its code or its files.",
                    ) from error
                yield f"sample {index}" + (f" ({item.origin})" if item.origin else ""), item
                index += 1

    def _fit(self, value: object, where: str) -> Sample:
        parts = arrays.by_name(value, self.inputs, where, self._notes)
        return {spec.name: self._fit_input(parts[spec.name], spec, where) for spec in self.inputs}

    def _fit_input(self, value: object, spec: InputSpec, where: str) -> Array:
        array = arrays.to_array(value, f"{where}, input '{spec.name}'")
        if self._plan is not None and self._plan.input_name == spec.name:
            array = self._plan.apply_to_array(array, where)
        array = arrays.fit_dtype(array, spec, where)
        array = array.reshape(arrays.fit_shape(array.shape, spec, where, free_batch=self._free_batch))
        arrays.check_finite(array, spec, where)
        # ONNX Runtime and the digest want C order; np.ascontiguousarray would turn a scalar into a vector.
        return np.asarray(array, order="C")

    def _empty(self, groups: arrays.Regrouper) -> DataError:
        if groups.leftover:
            return DataError(
                "The calibration data do not fill one batch of the model",
                where=self._source.facts.get("path", self._source.kind),
                observed=f"{groups.leftover} rows",
                expected=f"at least {groups.size}, the model's fixed batch",
            )
        return DataError(
            "The calibration data are empty",
            where=self._source.facts.get("path", self._source.kind),
            observed="no samples",
            expected="at least one sample for " + arrays.named_inputs(self.inputs),
            hint="A generator or reader that was read before has nothing left: create a new one.",
        )


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """A folder whose files are one sample each; it travels by pickle.

    Attributes:
        kind: what it is, in words.
        folder: where the files are.
        files: relative to it, in the order of the samples.
        read: one file's content.
        inputs: what the model takes.
        first: the position of the first file among all samples.
    """

    kind: str
    folder: Path
    files: Sequence[Path]
    read: Reader
    inputs: tuple[InputSpec, ...]
    first: int = 0

    def part(self, first: int, count: int) -> Division:
        """Some of the files."""
        return replace(self, files=self.files[first : first + count], first=self.first + first)

    def open(self) -> Samples:
        """The samples of these files, checked like all others."""

        def items() -> Generator[Item, None, None]:
            for file in self.files:
                yield Item(self.read(self.folder / file), str(file))

        source = Source(self.kind, items, count=len(self.files))
        return Samples(source, self.inputs, first=self.first)

    def digest(self) -> str:
        """Of the files' names, sizes and times of change; their content is not read."""
        digest = hashlib.blake2b(digest_size=16)
        for file in self.files:
            found = (self.folder / file).stat()
            digest.update(f"{file} {found.st_size} {found.st_mtime_ns}\n".encode())
        return digest.hexdigest()


JUDGED_EVERY = 4  # one item of so many is held out, where nothing else judges

_OF_A_PASS = frozenset({"kind", "count", "limit", "inputs", "notes"})


def held_out(index: int, every: int) -> bool:
    """Whether an item judges; these are spread over the data, which may be sorted by class."""
    return index % every == every - 1


def repeatable(samples: Samples) -> Samples:
    """The same data, held in memory where its source can be read only once."""
    if samples.repeatable:
        return samples
    held = [
        Item({name: array.copy() for name, array in sample.items()}, origin)
        for origin, sample in samples.named()
    ]

    def items() -> Generator[Item, None, None]:
        yield from held

    return _derived(samples, items, len(held), {"held": "in memory"})


def learning_part(samples: Samples, every: int) -> Samples:
    """The items that are not held out, of data that can be read more than once."""

    def items() -> Generator[Item, None, None]:
        with closing(samples.named()) as named:
            for index, (origin, sample) in enumerate(named):
                if not held_out(index, every):
                    yield Item(sample, origin)

    whole = samples.count
    count = None if whole is None else whole - whole // every
    return _derived(samples, items, count, {"part": f"one item of {every} is held out"})


def _derived(
    samples: Samples,
    items: Callable[[], Generator[Item, None, None]],
    count: int | None,
    more: dict[str, object],
) -> Samples:
    told = samples.description
    facts = {key: value for key, value in told.items() if key not in _OF_A_PASS}
    return Samples(Source(str(told["kind"]), items, count=count, facts={**facts, **more}), samples.inputs)
