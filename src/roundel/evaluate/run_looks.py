"""Runs models over items of data, here or in shards elsewhere, and looks at what they say."""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from roundel.data.hashing import SampleDigest
from roundel.data.shards import SIZE
from roundel.evaluate.looks import Look, look
from roundel.evaluate.predictor import Predictor
from roundel.executors import Work, mapped
from roundel.model.external import external_values
from roundel.model.graph import fingerprint
from roundel.model.load import ModelSource
from roundel.model.portable import Portable
from roundel.types import Arrays, Sample


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One item of the data.

    Attributes:
        origin: the file that it came from.
        samples: the item as each model takes it.
    """

    origin: str
    samples: tuple[Sample, ...]


def run_looks(
    predictors: Sequence[Predictor], items: Iterable[Item], *, keep: bool, work: Work
) -> Iterator[tuple[Item, list[Look]]]:
    """Each item with every model's look at it, in the order of the data.

    Args:
        predictors: the models, the first is what the others are compared with.
        items: the data.
        keep: whether all outputs are wanted.
        work: where, and what is remembered.

    Raises:
        DataError: an item does not fit a model, or the checkpoint is of another run.
        ModelError: ONNX Runtime cannot run a model.
    """
    if work.alone:
        for index, item in enumerate(items):
            yield item, _looks(predictors, item.samples, index, keep=keep)
        return
    task = _Task(tuple(map(_Carried.of, predictors)), keep)
    names = [list(predictor.outputs) if keep else [] for predictor in predictors]
    memory = None if work.store is None else work.memory("evaluate", _key(task, predictors))
    for part, arrays in mapped(work, task, _parts(items), memory):
        for place, item in enumerate(part.items):
            yield item, [_read(arrays, f"{place}.{model}.", kept) for model, kept in enumerate(names)]


def _looks(
    predictors: Sequence[Predictor], samples: Sequence[Sample], index: int, *, keep: bool
) -> list[Look]:
    found: list[Look] = []
    first = None
    for predictor, sample in zip(predictors, samples, strict=True):
        started = time.perf_counter()
        results = predictor.run(sample, index)
        seconds = time.perf_counter() - started
        main = predictor.outputs[0]
        found.append(look(results, main, first, keep=keep, seconds=seconds))
        first = results[main] if first is None else first
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    number: int
    items: tuple[Item, ...]
    digest: str


def _parts(items: Iterable[Item]) -> Iterator[_Part]:
    rest, number = iter(items), 0
    while some := tuple(_owned(item) for item in islice(rest, SIZE)):
        digest = SampleDigest()
        for sample in (sample for item in some for sample in item.samples):
            digest.update(sample)
        yield _Part(number, some, digest.hexdigest())
        number += 1


def _owned(item: Item) -> Item:
    """A copy: a reader may reuse its arrays. Models that share an input share the copy."""
    copies = {id(s): {name: array.copy() for name, array in s.items()} for s in item.samples}
    return Item(item.origin, tuple(copies[id(s)] for s in item.samples))


@dataclass(frozen=True, slots=True, eq=False)
class _Carried:
    """A model that travels: its files as they are, or what is in memory."""

    name: str
    files: dict[str, bytes]
    portable: Portable | None

    @staticmethod
    def of(predictor: Predictor) -> _Carried:
        path = predictor.path
        if path is None:
            return _Carried("", {}, Portable.of(predictor.model))
        beside = {Path(tensor.path) for _, tensor in external_values(predictor.model)}
        home = path.resolve().parent
        others = {str(file.resolve().relative_to(home)): file.read_bytes() for file in beside}
        return _Carried(path.name, {path.name: path.read_bytes(), **others}, None)

    def unpacked(self, folder: Path) -> ModelSource:
        if self.portable is not None:
            return self.portable.model()
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return folder / self.name

    def digest(self, predictor: Predictor) -> str:
        if self.portable is not None:
            return fingerprint(predictor.model)
        digest = hashlib.blake2b(digest_size=16)
        for name, content in sorted(self.files.items()):
            digest.update(f"{len(name)} {name} {len(content)} ".encode() + content)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    models: tuple[_Carried, ...]
    keep: bool

    def open(self, cores: int) -> _Opened:
        with tempfile.TemporaryDirectory(prefix="roundel-") as folder:
            predictors = []
            for number, carried in enumerate(self.models):
                home = Path(folder) / str(number)
                home.mkdir()
                predictors.append(Predictor(carried.unpacked(home), threads=cores))
            return _Opened(predictors, self.keep)


@dataclass(frozen=True, slots=True, eq=False)
class _Opened:
    predictors: Sequence[Predictor]
    keep: bool
    parallel: int = 1

    def __call__(self, part: _Part) -> Arrays:
        arrays: Arrays = {}
        for place, item in enumerate(part.items):
            index = part.number * SIZE + place
            for model, one in enumerate(_looks(self.predictors, item.samples, index, keep=self.keep)):
                arrays |= {f"{place}.{model}.{key}": array for key, array in one.arrays().items()}
        return arrays


def _read(arrays: Arrays, prefix: str, outputs: Sequence[str]) -> Look:
    own = {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}
    return Look.from_arrays(own, outputs)


def _key(task: _Task, predictors: Sequence[Predictor]) -> dict[str, str]:
    models = [carried.digest(p) for carried, p in zip(task.models, predictors, strict=True)]
    kept = "all" if task.keep else "none"
    return {**{f"model {number}": digest for number, digest in enumerate(models)}, "kept outputs": kept}
