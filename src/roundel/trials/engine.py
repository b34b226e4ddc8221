"""Quantize with some changes, judge by one number, again and again: what the ladder and the studies share."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundel.data import Samples
from roundel.data.samples import JUDGED_EVERY, learning_part, repeatable
from roundel.errors import DataError
from roundel.measure.scores import Metric
from roundel.measure.yardstick import Judgement, Yardstick
from roundel.model import load_model
from roundel.model.structure import ModelSource
from roundel.outputs import metric_file
from roundel.passes import settle_branches
from roundel.pipeline import quantize
from roundel.recipe.load import RecipeSource
from roundel.recipe.settings import Recipe
from roundel.result import QuantizeResult
from roundel.rules.report import check
from roundel.stages import open_data, prepare
from roundel.types import Listener
from roundel.work.executors import Executor

_DEVICE = "stx"  # whose placement is predicted where none was named
_FEWEST = 2  # samples that can be split


@dataclass(frozen=True, slots=True)
class Question:
    """What to judge, and by what.

    Attributes:
        data: calibration data, as `roundel.quantize` takes it.
        eval_data: data to judge by; without it, one item of four of `data` is held out for that.
        labels: of what judges (of all of `data` without `eval_data`).
        metric: as `Yardstick` takes it.
        lower: whether less of it is better.
        decoder: of boxes, as `roundel.evaluate` takes it.
    """

    data: object
    eval_data: object = None
    labels: object = None
    metric: str | Metric | None = None
    lower: bool = False
    decoder: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """Makes models from one float model, and judges them on the same data.

    Attributes:
        model: the float model.
        learn: what is learned from.
        yardstick: judges.
        judged_on: what, in words.
        folder: for the models on trial; it vanishes at the end.
        device: the NPU they are for.
        executor: where calibration runs.
        decoder: of boxes, where one was named.
    """

    model: ModelSource
    learn: Samples
    yardstick: Yardstick
    judged_on: str
    folder: Path
    device: str | None = None
    executor: Executor | None = None
    decoder: str | None = None

    @property
    def path(self) -> Path:
        """Of the model on trial."""
        return self.folder / "trial.onnx"

    def make(
        self,
        path: Path,
        recipe: RecipeSource,
        told: Listener,
        *,
        changes: Mapping[str, Any] | None = None,
        stats: Path | None = None,
    ) -> QuantizeResult:
        """Quantize to a file.

        Args:
            path: of the file.
            recipe: as `roundel.quantize` takes it.
            told: hears about progress.
            changes: to the recipe.
            stats: a statistics file that tries with the same float graph share.
        """
        return quantize(
            self.model,
            path,
            recipe=recipe,
            data=self.learn,
            changes=changes,
            stats=stats,
            device=self.device,
            executor=self.executor,
            listener=told,
        )

    def judge(self, told: Listener) -> Judgement:
        """What the metric says of the model on trial."""
        return self.yardstick.judge(self.path, told)

    def npu_share(self) -> float | None:
        """Share of its multiplications that the NPU is predicted to take."""
        return check(self.path, device=self.device or _DEVICE).after.npu_share

    def file_bytes(self) -> int:
        """Size of its files."""
        return sum(file.stat().st_size for file in self.folder.glob(f"{self.path.name}*"))


def what_is_read(model: ModelSource, question: Question) -> dict[str, object]:
    """What a run that judges its own models reads, by what it is."""
    return {
        "input model": model,
        "calibration data": question.data,
        "evaluation data": question.eval_data,
        "labels": question.labels,
        "metric": metric_file(question.metric),
    }


@contextmanager
def trying(
    model: ModelSource,
    recipe: Recipe,
    question: Question,
    told: Listener,
    device: str | None = None,
    executor: Executor | None = None,
) -> Iterator[Engine]:
    """An engine whose float model has run over what judges; its folder, and the live line, vanish at the end.

    Args:
        model: the float model.
        recipe: how files become samples, and shapes that are fixed.
        question: data, labels and metric.
        told: hears about progress.
        device: the NPU it is for.
        executor: where calibration runs.

    Raises:
        RoundelError: data, labels or metric do not fit the model.
    """
    with tempfile.TemporaryDirectory(prefix="roundel-trials-") as name:
        try:
            ready = prepare(model, recipe)
            float_model, fixed = ready.model, ready.fixed
            samples = repeatable(open_data(float_model, recipe.data, question.data, fixed))
            if question.eval_data is None:
                every = _held_out_every(samples)
                learn, judge = learning_part(samples, every), samples
                where = f"the calibration data, one of {every} held out"
            else:
                # The limit on calibration samples is none on those that judge.
                options = recipe.data.model_copy(update={"samples": None})
                learn, judge = samples, repeatable(open_data(float_model, options, question.eval_data, fixed))
                every, where = None, "the evaluation data"
            yardstick = Yardstick(
                _as_fixed(model, recipe),
                judge,
                labels=question.labels,
                metric=question.metric,
                lower=question.lower,
                every=every,
                decoder=question.decoder,
                listener=told,
            )
            words = f"{yardstick.samples} samples of {where}"
            yield Engine(model, learn, yardstick, words, Path(name), device, executor, question.decoder)
        finally:
            told.close()


def _as_fixed(model: ModelSource, recipe: Recipe) -> ModelSource:
    """The float model as it was written, but without the inputs that samples do not hold."""
    if not recipe.prepare.fixed_inputs:
        return model
    fixed = load_model(model).model.clone()
    settle_branches(fixed, recipe.prepare)
    return fixed


def _held_out_every(samples: Samples) -> int:
    count = samples.count
    if count is None or count < 2 * JUDGED_EVERY:
        count = sum(1 for _ in samples.named())
    if count < _FEWEST:
        raise DataError(
            "One sample cannot be learned from and judged by.",
            observed=f"{count} sample",
            expected="at least two, better a hundred",
            hint="Give data to judge by: --eval-data.",
        )
    return min(JUDGED_EVERY, count)


class OutOfTime(Exception):  # noqa: N818 - no error: the walk catches it
    """A try was still at work when time was over."""


class TitledListener:
    """Passes everything on with a try's name, and ends the try when time is over.

    Args:
        listener: who is told.
        title: put before each step's name.
        deadline: on the clock of `time.perf_counter`; None for no end.
    """

    def __init__(self, listener: Listener, title: str, deadline: float | None = None) -> None:
        self._listener, self._title, self._deadline = listener, title, deadline

    def step(self, name: str, total: int | None = None) -> None:
        """A step begins."""
        self._look()
        self._listener.step(f"{self._title}: {name}", total)

    def advance(self, done: float) -> None:
        """Some of it is done."""
        self._look()
        self._listener.advance(done)

    def say(self, text: str) -> None:
        """A few words."""
        self._look()
        self._listener.say(text)

    def close(self) -> None:
        """The live line goes away."""
        self._listener.close()

    def _look(self) -> None:
        if self._deadline is not None and time.perf_counter() > self._deadline:
            raise OutOfTime
