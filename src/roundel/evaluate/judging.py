"""What is learned from and what is judged by: two sets of data, or one that is split."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from roundel.data import Samples
from roundel.data.splitting import JUDGED_EVERY, learning_part, repeatable
from roundel.errors import DataError
from roundel.evaluate.metric import Metric
from roundel.evaluate.yardstick import Yardstick
from roundel.evidence import open_data
from roundel.model.load import ModelSource
from roundel.preparation import load_prepared
from roundel.recipe import Recipe
from roundel.report.listener import Listener

_FEWEST = 2


@dataclass(frozen=True, slots=True)
class Question:
    """What to judge, and by what.

    Attributes:
        data: calibration data, as `roundel.quantize` takes it.
        eval_data: data to judge by; without it, one item of four of `data` is held out for that.
        labels: of what judges (of all of `data` without `eval_data`).
        metric: as `Yardstick` takes it.
        lower: whether less of it is better.
    """

    data: object
    eval_data: object = None
    labels: object = None
    metric: str | Metric | None = None
    lower: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Judging:
    """What is learned from, what is judged by, and the latter in words."""

    learn: Samples
    yardstick: Yardstick
    words: str


def prepare_judging(
    model: ModelSource, recipe: Recipe, question: Question, folder: Path, told: Listener
) -> Judging:
    """Open the data and run the float model over what judges.

    Args:
        model: the float model.
        recipe: how files become samples, and shapes that are fixed.
        question: data, labels and metric.
        folder: an empty folder that lives as long as the result.
        told: hears about progress.

    Raises:
        RoundelError: data, labels or metric do not fit the model.
    """
    float_model = load_prepared(model, recipe).model
    samples = repeatable(open_data(float_model, recipe.data, question.data))
    every = None
    if question.eval_data is None:
        every = _held_out_every(samples)
        learn, judge = learning_part(samples, every), samples
    else:
        # The limit on calibration samples is none on those that judge.
        options = recipe.data.model_copy(update={"samples": None})
        learn, judge = samples, repeatable(open_data(float_model, options, question.eval_data))
    yardstick = Yardstick(
        model,
        judge,
        folder,
        labels=question.labels,
        metric=question.metric,
        lower=question.lower,
        every=every,
        listener=told,
    )
    where = "the evaluation data" if every is None else f"the calibration data, one of {every} held out"
    return Judging(learn, yardstick, f"{yardstick.samples} samples of {where}")


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
