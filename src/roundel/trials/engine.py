"""Quantize with some changes, judge by one number, again and again: what the ladder and the studies share."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundel.measure.yardstick import Judgement, Judging, Question, prepare_judging
from roundel.model.structure import ModelSource
from roundel.outputs import metric_file
from roundel.pipeline import quantize
from roundel.recipe.load import RecipeSource
from roundel.recipe.settings import Recipe
from roundel.result import QuantizeResult
from roundel.rules.report import check
from roundel.types import Listener
from roundel.work.executors import Executor

_DEVICE = "stx"  # whose placement is predicted where none was named


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """Makes models from one float model, and judges them on the same data.

    Attributes:
        model: the float model.
        judging: what is learned from and what is judged by.
        folder: for the models on trial; it vanishes at the end.
        device: the NPU they are for.
        executor: where calibration runs.
    """

    model: ModelSource
    judging: Judging
    folder: Path
    device: str | None = None
    executor: Executor | None = None

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
            data=self.judging.learn,
            changes=changes,
            stats=stats,
            device=self.device,
            executor=self.executor,
            listener=told,
        )

    def judge(self, told: Listener) -> Judgement:
        """What the metric says of the model on trial."""
        return self.judging.yardstick.judge(self.path, told)

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
            judging = prepare_judging(model, recipe, question, told)
            yield Engine(model, judging, Path(name), device, executor)
        finally:
            told.close()


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
