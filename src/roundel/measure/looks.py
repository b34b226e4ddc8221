"""What one model says about one sample, in the few numbers that every score follows from."""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundel.data.shards import SIZE, SampleDigest
from roundel.measure.infer import Predictor
from roundel.model.files import Portable, external_values
from roundel.model.graph import fingerprint
from roundel.model.load import ModelSource
from roundel.numerics.metrics import Closeness
from roundel.types import Arrays, Sample
from roundel.work.executors import Work, mapped

TOP = 5
_SUMS = ("signal", "noise", "cross", "other", "worst")


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """One model, one sample.

    Attributes:
        shape: of the first output.
        classes: how many, 0 where the first output is not class scores.
        best: the classes with the largest scores of each row, the very largest first; [rows, 0] without any.
        same: rows with the same largest score as the first model.
        close: the first output against the first model's; None for the first, or where shapes differ.
        outputs: all of them, where a metric wants them.
        seconds: inside the model.
    """

    shape: tuple[int, ...]
    classes: int
    best: NDArray[np.int64]
    same: int
    close: Closeness | None
    outputs: dict[str, NDArray[Any]] | None
    seconds: float

    @property
    def rows(self) -> int:
        """Rows that labels are for."""
        return self.shape[0] if len(self.shape) > 1 else 1

    def arrays(self) -> Arrays:
        """Plain arrays that `from_arrays` reads back."""
        c = self.close
        found: Arrays = {
            "shape": np.array(self.shape, np.int64),
            "counts": np.array(
                [self.classes, self.same, 0 if c is None else c.count, c is not None], np.int64
            ),
            "best": self.best,
            "close": np.array([c.signal, c.noise, c.cross, c.other, c.worst] if c else [0.0] * 5, np.float64),
            "seconds": np.array(self.seconds),
        }
        # Names of outputs may hold anything, dots included.
        return found | {f"out.{name}": array for name, array in (self.outputs or {}).items()}

    @staticmethod
    def from_arrays(arrays: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> Look:
        """The inverse of `arrays`; `outputs` names those that were kept."""
        classes, same, count, known = arrays["counts"].tolist()
        return Look(
            tuple(arrays["shape"].tolist()),
            classes,
            arrays["best"],
            same,
            Closeness(**dict(zip(_SUMS, arrays["close"].tolist(), strict=True)), count=count)
            if known
            else None,
            {name: arrays[f"out.{name}"] for name in outputs} or None,
            float(arrays["seconds"]),
        )


def look(
    results: Mapping[str, NDArray[Any]],
    main: str,
    first: NDArray[Any] | None,
    *,
    keep: bool,
    seconds: float,
) -> Look:
    """Look at one model's outputs for one sample.

    Args:
        results: by name.
        main: the name of the first output.
        first: what the first model says; None for itself.
        keep: whether a metric wants all outputs.
        seconds: inside the model.
    """
    scores = results[main]
    comparable = first is not None and first.shape == scores.shape
    close = Closeness.of(first, scores) if first is not None and comparable else None
    outputs = dict(results) if keep else None
    table = class_scores(scores)
    if table is None:
        return Look(scores.shape, 0, np.zeros((0, 0), np.int64), 0, close, outputs, seconds)
    top = table.argmax(1)
    near = np.argpartition(-table, min(TOP, table.shape[1]) - 1, axis=1)[:, :TOP]
    best = np.concatenate([top[:, None], near], axis=1).astype(np.int64)
    same = int((top == first.reshape(table.shape).argmax(1)).sum()) if first is not None and comparable else 0
    return Look(scores.shape, table.shape[1], best, same, close, outputs, seconds)


def class_scores(array: NDArray[Any]) -> NDArray[Any] | None:
    """[rows, classes] of an output that is class scores, None of any other."""
    if array.ndim < 2 or array.shape[1] < 2 or array.size != array.shape[0] * array.shape[1]:
        return None
    return array.reshape(array.shape[:2])


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationItem:
    """One item of the data.

    Attributes:
        origin: the file that it came from.
        samples: the item as each model takes it.
    """

    origin: str
    samples: tuple[Sample, ...]


def run_looks(
    predictors: Sequence[Predictor], items: Iterable[EvaluationItem], *, keep: bool, work: Work
) -> Iterator[tuple[EvaluationItem, list[Look]]]:
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
    items: tuple[EvaluationItem, ...]
    digest: str


def _parts(items: Iterable[EvaluationItem]) -> Iterator[_Part]:
    rest, number = iter(items), 0
    while some := tuple(_owned(item) for item in islice(rest, SIZE)):
        digest = SampleDigest()
        for sample in (sample for item in some for sample in item.samples):
            digest.update(sample)
        yield _Part(number, some, digest.hexdigest())
        number += 1


def _owned(item: EvaluationItem) -> EvaluationItem:
    """A copy: a reader may reuse its arrays. Models that share an input share the copy."""
    copies = {id(s): {name: array.copy() for name, array in s.items()} for s in item.samples}
    return EvaluationItem(item.origin, tuple(copies[id(s)] for s in item.samples))


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
