"""Models judged by one metric, on the same data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from roundel.data import Samples
from roundel.data.kept import KeptSamples
from roundel.data.samples import held_out
from roundel.errors import DataError, RecipeError, did_you_mean
from roundel.measure import scores
from roundel.measure.boxes import BOX_METRICS, BoxRuler
from roundel.measure.labels import Labels, check_labels
from roundel.measure.runner import Predictor
from roundel.measure.scores import paired_margin
from roundel.model.structure import ModelSource
from roundel.numerics.metrics import Closeness, decibels
from roundel.types import Array, Arrays, Listener, Sample, Silent

_LABELLED = ("top1", "top5")
BUILTIN = {
    "top1": "share of rows whose largest score is the label's",
    "top5": "share of rows whose label is among the five largest scores",
    "agreement": "share of rows whose largest score is the float model's",
    "fidelity": "1 - error power / signal power against the float model: 99 % is 20 dB",
    "cosine": "cosine similarity with the float model's outputs",
    "map": "mAP50-95 of boxes by COCO's rules",
    "boxf1": "F1 of boxes with the float model's",
    "sqnr": "signal to noise against the float model's outputs, in dB",
}


@dataclass(frozen=True, slots=True)
class Measure:
    """What is measured.

    Attributes:
        name: a builtin's, or that of the user's function.
        words: what it means.
        lower: whether less is better.
        share: whether it is a part of one, which is shown as a percentage.
        function: the user's own.
        pair: of an output of the float model and one of another; what counts is the mean over all.
    """

    name: str
    words: str
    lower: bool = False
    share: bool = True
    function: scores.Metric | None = None
    pair: Callable[[Array, Array], float] | None = None

    def text(self, value: float) -> str:
        """A value of it for people."""
        return f"{value:.2%}" if self.share else f"{value:.4g}"

    def better(self, value: float, other: float) -> bool:
        """Whether a value is better than another."""
        return value < other if self.lower else value > other


@dataclass(frozen=True, slots=True)
class Judgement:
    """One model.

    Attributes:
        value: of the metric.
        sqnr_db: all float outputs, which count alike, against the float model's; None for that itself.
        seconds: to run all of the data.
        margin: half of the interval that holds the difference to the float model with 95 %, were there no end
            of such data; None for a metric that does not count rows.
    """

    value: float
    sqnr_db: float | None
    seconds: float
    margin: float | None = None


def _noise(close: Sequence[Closeness]) -> float:
    """Mean over the outputs of error power over signal power."""
    shares = [c.noise / c.signal if c.signal > 0 else float(c.noise > 0) for c in close]
    return sum(shares) / len(shares) if shares else 0.0


class Yardstick:
    """Judges models by one metric on the same data; the float model's outputs are kept.

    Args:
        model: the float model.
        samples: the data; it can be read more than once.
        labels: as `roundel.evaluate_models` takes them; their order is that of all samples.
        metric: a builtin's name, 'module:function', 'file.py:function', a function, a measure, or None: top1
            with labels, else agreement for class scores and fidelity for anything else.
        lower: whether less of the user's metric is better.
        every: judge only the items that are held out, one of so many; None: all.
        decoder: of boxes, as `roundel.evaluate` takes it.
        listener: told about progress.

    Raises:
        RoundelError: the metric, the labels or the data do not fit the model.
    """

    def __init__(
        self,
        model: ModelSource,
        samples: Samples,
        *,
        labels: object = None,
        metric: str | scores.Metric | Measure | None = None,
        lower: bool = False,
        every: int | None = None,
        decoder: str | None = None,
        listener: Listener | None = None,
    ) -> None:
        self._samples, self._every, self._wanted = samples, every, KeptSamples()
        self._labels: list[list[int] | None] = []
        self._best: list[NDArray[np.int64]] = []  # classes that the float model puts first
        self._known = labels is not None
        told, predictor, start = listener or Silent(), Predictor(model), time.perf_counter()
        self.outputs = predictor.outputs
        given, path = measure_of(metric, lower=lower), samples.description.get("path")
        self._boxes: BoxRuler | None = None
        if given is not None and given.name in BOX_METRICS and given.function is None:
            if given.name == "map" and labels is None:
                raise _no_labels(given.name)
            self._boxes = BoxRuler(predictor.model, labels, samples.images, decoder)
            labels = None
        elif decoder is not None:
            raise _no_boxes(decoder)
        truth = Labels(labels, None if path is None else Path(str(path)))
        first, tally = self._run_float(predictor, truth, given, told)
        self.samples, self.rows = len(self._labels), tally.rows or len(self._labels)
        self.measure = given or _fitting(first, labelled=self._known)
        self._floats = [array.dtype.kind == "f" for array in first.values()]
        self._check(first)
        self.reference = Judgement(self._value(tally), None, time.perf_counter() - start)

    def judge(self, model: ModelSource, listener: Listener | None = None) -> Judgement:
        """Run a model over the same data.

        Raises:
            RoundelError: the model cannot be run, or the user's metric fails.
        """
        told, start, tally = listener or Silent(), time.perf_counter(), scores.ScoreTally()
        predictor = Predictor(model)
        told.step("judge", self.samples)
        kept, changes = (item for item in self._items() if item[1]), [0, 0]
        for done, (index, _, _, sample) in enumerate(kept):
            outputs = predictor.run(sample, index)
            best = self._add(tally, outputs, self._wanted[done], self.measure, self._labels[done])
            if self._boxes is not None:
                tally.kept.append(self._boxes.read(sample, outputs))
            if self.resolution is not None:
                then, now = self._hits(self._best[done], done), self._hits(best, done)
                changes[0] += int((then & ~now).sum())
                changes[1] += int((now & ~then).sum())
            told.advance(done + 1)
        sqnr_db = decibels(1.0, _noise(self._close(tally)))
        lost, won = changes
        margin = None if self.resolution is None else paired_margin(lost, won, tally.rows)
        return Judgement(self._value(tally), sqnr_db, time.perf_counter() - start, margin)

    def _hits(self, best: NDArray[np.int64], done: int) -> NDArray[np.bool_]:
        """Which rows of a sample count for the metric."""
        if self.measure.name == "agreement":
            return np.asarray(best[:, 0] == self._best[done][:, 0])
        some = best[:, :1] if self.measure.name == "top1" else best[:, 1:]
        return np.asarray((some == np.asarray(self._labels[done])[:, None]).any(1))

    def _run_float(
        self, predictor: Predictor, truth: Labels, given: Measure | None, told: Listener
    ) -> tuple[Arrays, scores.ScoreTally]:
        """Remember the float model's outputs and the labels; gives the first outputs and the counts."""
        tally, first = scores.ScoreTally(), None
        told.step("run the float model")
        for index, kept, origin, sample in self._items():
            if not kept:
                truth.of(origin, _rows_in(sample))  # labels that are in order of the data must keep step
                continue
            outputs = predictor.run(sample, index)
            first = first if first is not None else outputs
            self._labels.append(truth.of(origin, _rows_in(outputs)))
            self._wanted.append(outputs)
            self._best.append(self._add(tally, outputs, outputs, given, self._labels[-1]))
            if self._labels[-1] is not None and (given is None or given.function is None):
                check_labels(self._labels[-1], tally.classes, origin)
            if self._boxes is not None:
                tally.kept.append(self._boxes.read(sample, outputs))
                self._boxes.expect(origin, tally.kept[-1])
            told.advance(len(self._labels))
        if first is None:
            raise DataError("There is nothing to judge by.", expected="at least one held-out sample")
        return first, tally

    def _add(
        self,
        tally: scores.ScoreTally,
        outputs: Arrays,
        wanted: Arrays,
        measure: Measure | None,
        labels: list[int] | None,
    ) -> NDArray[np.int64]:
        """Count one sample; a user's metric knows the float model's names. Gives each row's first classes."""
        named = dict(zip(wanted, outputs.values(), strict=True))
        keep = measure is not None and measure.function is not None
        looked = scores.look(named, list(wanted.values()), keep=keep)
        tally.add(looked, labels)
        if measure is not None and measure.pair is not None:
            tally.kept += [measure.pair(array, named[name]) for name, array in wanted.items()]
        return looked.best

    def _close(self, tally: scores.ScoreTally) -> list[Closeness]:
        """Of the outputs that have an error: floats, of one shape in both models."""
        return [c for c, is_float in zip(tally.close, self._floats, strict=True) if is_float and c.count]

    @property
    def resolution(self) -> float | None:
        """The smallest step that a metric which counts rows can make; None for others."""
        counts = self.measure.name in (*_LABELLED, "agreement") and self.measure.function is None
        return 1 / self.rows if counts else None

    def _items(self) -> Iterator[tuple[int, bool, str, Sample]]:
        with closing(self._samples.named()) as named:
            for index, (origin, sample) in enumerate(named):
                yield index, self._every is None or held_out(index, self._every), origin, sample

    def _value(self, tally: scores.ScoreTally) -> float:
        measure = self.measure
        if measure.function is not None:
            labels = self._labels if self._known else None
            found = scores.scores(measure.name, measure.function, tally.kept, labels)
            if len(found) != 1:
                raise RecipeError(
                    "A budget needs one number, and the metric gives several.",
                    where=measure.name,
                    observed=", ".join(found),
                    expected="a function that returns one number",
                )
            return next(iter(found.values()))
        if measure.pair is not None:
            return float(sum(tally.kept)) / len(tally.kept)
        if self._boxes is not None:
            return self._boxes.value(measure.name, tally.kept)
        rows, close = max(tally.rows, 1), self._close(tally)
        values: dict[str, Callable[[], float]] = {
            "top1": lambda: tally.right / rows,
            "top5": lambda: tally.near / rows,
            "agreement": lambda: tally.same / rows,
            "cosine": lambda: sum(c.cosine for c in close) / len(close) if close else 1.0,
            "fidelity": lambda: max(0.0, 1 - _noise(close)),
            "sqnr": lambda: decibels(1.0, _noise(close)),
        }
        return values[measure.name]()

    def _check(self, first: Arrays) -> None:
        """The metric must be one that this model and these labels have."""
        name = self.measure.name
        if self.measure.function is not None or self.measure.pair is not None:
            return
        if name in _LABELLED and not self._known:
            raise _no_labels(name)
        main = next(iter(first.values()))
        if name in (*_LABELLED, "agreement") and scores.class_scores(main) is None:
            raise DataError(
                f"The first output is not class scores, which the metric {name} needs.",
                where=f"output '{self.outputs[0]}'",
                observed=f"shape {list(main.shape)}",
                expected="[rows, classes]",
                hint="Use --metric fidelity, or one of your own: --metric file.py:function.",
            )


def measure_of(metric: str | scores.Metric | Measure | None, *, lower: bool = False) -> Measure | None:
    """The measure that a user names; None where the model decides.

    Raises:
        RecipeError: there is none of that name.
    """
    if metric is None or isinstance(metric, Measure):
        return metric
    if isinstance(metric, str) and ":" not in metric:
        name = metric.strip().casefold().replace("-", "")
        if name not in BUILTIN:
            raise RecipeError(
                f"There is no metric '{metric}'.",
                where="--metric",
                expected=", ".join(BUILTIN) + ", module:function or file.py:function",
                hint=did_you_mean(name, BUILTIN),
            )
        if lower:
            raise RecipeError("More is better for every builtin metric.", where=f"--metric {name}, lower")
        return Measure(name, BUILTIN[name], share=name != "sqnr")
    own, function = scores.named_metric(metric)
    return Measure(own, "the user's own", lower=lower, share=False, function=function)


def _no_boxes(decoder: str) -> RecipeError:
    return RecipeError(
        "A decoder is for boxes, and the metric is not about boxes.",
        where=f"--decoder {decoder}",
        expected="--metric " + " or ".join(BOX_METRICS),
    )


def _no_labels(name: str) -> RecipeError:
    return RecipeError(f"The metric {name} needs labels.", where=f"--metric {name}", expected="--labels …")


def _fitting(first: Arrays, *, labelled: bool) -> Measure:
    """The measure that suits a model's outputs best."""
    floats = [a for a in first.values() if a.dtype.kind == "f"]
    classes = len(floats) == 1 and len(first) == 1 and scores.class_scores(floats[0]) is not None
    name = "top1" if labelled else "agreement" if classes else "fidelity"
    return Measure(name, BUILTIN[name])


def _rows_in(arrays: Arrays) -> int:
    array = next(iter(arrays.values()))
    return len(array) if array.ndim > 1 else 1
