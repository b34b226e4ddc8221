"""A user's own metric, by the name of its function."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import io
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from roundel.data import Samples
from roundel.data.lint import record_findings
from roundel.errors import DataError, ModelError, RecipeError, did_you_mean
from roundel.measure.infer import Predictor
from roundel.measure.labels import Labels
from roundel.measure.looks import TOP, EvaluationItem, Look, run_looks
from roundel.model.load import ModelSource
from roundel.numerics.metrics import Closeness
from roundel.recipe.settings import Data
from roundel.stages import open_data
from roundel.types import InputSpec, Listener, Silent
from roundel.work.checkpoints import open_store
from roundel.work.executors import Executor, Work

Metric = Callable[[list[Any], list[Any] | None], Any]

_FORM = "module:function or file.py:function"


def load_metric(text: str) -> tuple[str, Metric]:
    """The name and the function that 'module:function' or 'file.py:function' means.

    The function is called once for each model with two lists: the model's outputs, one entry for each sample
    (an array, or a dictionary of arrays where the model has several outputs), and the labels of each sample's
    rows (None when there are none). It returns a number, or a dictionary of numbers.

    Raises:
        RecipeError: there is no such function.
    """
    home, colon, name = text.rpartition(":")
    if not colon or not home or not name:
        raise RecipeError("The metric's name is not complete.", observed=text, expected=_FORM)
    module = _from_file(Path(home)) if home.endswith(".py") else _from_name(home)
    function = getattr(module, name, None)
    if not callable(function):
        raise RecipeError(
            f"There is no function '{name}' there.", where=home, hint=did_you_mean(name, dir(module))
        )
    return name, function


def scores(name: str, function: Metric, outputs: list[Any], labels: list[Any] | None) -> dict[str, float]:
    """What the metric says, by name.

    Raises:
        RecipeError: the metric fails, or gives something else than numbers.
    """
    try:
        result = function(outputs, labels)
    except Exception as error:
        # Deliberately broad: the user's own code runs here and may raise anything.
        raise RecipeError(
            "The metric failed.", where=name, observed=f"{type(error).__name__}: {error}"
        ) from error
    named = dict(result) if isinstance(result, Mapping) else {name: result}
    try:
        found = {str(key): float(value) for key, value in named.items()}
    except (TypeError, ValueError) as error:
        raise RecipeError(
            "The metric gave no number.", where=name, observed=repr(result)[:200], expected="a number"
        ) from error
    if not all(math.isfinite(value) for value in found.values()):
        raise RecipeError("The metric is not finite.", where=name, observed=found)
    return found


def _from_name(name: str) -> Any:
    # As `python -m` does: a module beside the user is found before installed ones.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RecipeError(
            "The metric's module cannot be imported.", where=name, observed=error, expected=_FORM
        ) from error


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise RecipeError("The metric's file does not exist.", where=path, expected=_FORM)
    spec = importlib.util.spec_from_file_location(f"roundel_metric_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        # Deliberately broad: the user's own code runs here and may raise anything.
        raise RecipeError(
            "The metric's file cannot be run.", where=path, observed=f"{type(error).__name__}: {error}"
        ) from error
    return module


Inputs = tuple[InputSpec, ...]


@dataclass(frozen=True, slots=True)
class ModelScore:
    """One model.

    Attributes:
        model: file name.
        file_bytes: its size, None for a model in memory.
        rows: how many rows were judged.
        top1: share of rows whose largest score is the label's; None without labels.
        top5: share of rows whose label is among the five largest scores; None without labels, or with no more
            than five classes.
        agreement: share of rows with the same largest score as the first model; None for the first.
        sqnr_db: the first output against the first model's; None for the first.
        cosine: likewise.
        metric: what the user's metric says, by name.
        seconds: inside the model.
        notes: what a careful reader wants to know, such as data unlike that of the calibration.
    """

    model: str
    file_bytes: int | None
    rows: int
    top1: float | None
    top5: float | None
    agreement: float | None
    sqnr_db: float | None
    cosine: float | None
    metric: Mapping[str, float]
    seconds: float
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values; an infinite number becomes a string."""
        tree = asdict(self)
        if tree["sqnr_db"] in (float("inf"), float("-inf")):
            tree["sqnr_db"] = str(tree["sqnr_db"])
        return tree


@dataclass(slots=True, eq=False)
class _Tally:
    """Running counts of one model."""

    predictor: Predictor
    rows: int = 0
    classes: int = 0
    right: int = 0
    near: int = 0
    same: int = 0
    close: Closeness = field(default_factory=Closeness)
    kept: list[Any] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, look: Look, labels: Sequence[int] | None) -> None:
        """Count one sample's rows.

        Args:
            look: what the model says.
            labels: of the rows.
        """
        self.seconds += look.seconds
        if look.close is not None:
            self.close = self.close.merge(look.close)
        if look.outputs is not None:
            self.kept.append(next(iter(look.outputs.values())) if len(look.outputs) == 1 else look.outputs)
        if not look.classes:
            return
        self.rows += len(look.best)
        self.classes = look.classes
        self.same += look.same
        if labels is not None:
            hits = look.best == np.asarray(labels)[:, None]
            self.right += int(hits[:, 0].sum())
            self.near += int(hits[:, 1:].any(1).sum())


def evaluate_models(
    models: Sequence[ModelSource],
    data: object,
    *,
    labels: object = None,
    metric: str | Metric | None = None,
    options: Data | None = None,
    executor: Executor | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    listener: Listener | None = None,
) -> tuple[ModelScore, ...]:
    """Run models over one set of data, in one pass.

    Args:
        models: the float model first; the others are compared with it.
        data: whatever `roundel.quantize` takes.
        labels: None, one class number for each row, a mapping from file name to class number, a file of
            either (.npy, .npz, .json, .csv, .txt), 'folders', or 're:REGEX'.
        metric: a function, 'module:function' or 'file.py:function'; see docs/evaluate.md.
        options: how files become samples, and how many; see the `data` section of recipes.
        executor: where the models run, from `roundel.executor(…)`; this process when not given.
        checkpoint: a folder that holds what is done, shard by shard.
        resume: go on from the checkpoint where there is one; the scores are those of a run without a break.
        listener: told about progress.

    Raises:
        RoundelError: a model, the data, the labels or the metric do not fit.
    """
    if not models:
        raise ModelError("There is no model to evaluate.")
    told, work = listener or Silent(), Work(executor, open_store(checkpoint, resume=resume))
    tallies = [_Tally(Predictor(model)) for model in models]
    predictors = [tally.predictor for tally in tallies]
    name, function = _metric(metric)
    truth = Labels(labels, Path(data) if isinstance(data, str | Path) else None)
    opened = _opened(tallies, data, options or Data())
    kept: list[list[int] | None] = []
    told.step("evaluate", next(iter(opened.values())).count)
    try:
        seen = run_looks(predictors, _together(tallies, opened), keep=function is not None, work=work)
        for item, looks in seen:
            answers = truth.of(item.origin, _labelled_rows(looks[0], tallies[0], truth, metric))
            kept.append(answers)
            for tally, look in zip(tallies, looks, strict=True):
                tally.add(look, answers)
            told.advance(len(kept))
    finally:
        told.close()
    wanted = kept if truth.known else None
    scored = [_score(tally, tallies[0], (name, function), wanted) for tally in tallies]
    return tuple(
        replace(score, notes=tuple(str(finding) for finding in record_findings(tally.predictor.path, seen)))
        for score, tally, seen in zip(scored, tallies, _seen_by(tallies, opened), strict=True)
    )


def scores_csv(scores: Sequence[ModelScore]) -> str:
    """One line for each model, after a heading; the metrics have columns of their own."""
    metrics = list(dict.fromkeys(name for score in scores for name in score.metric))
    plain = [f.name for f in fields(ModelScore) if f.name not in ("metric", "notes")]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*plain, *metrics])
    for score in scores:
        values = [getattr(score, name) for name in plain] + [score.metric.get(name) for name in metrics]
        writer.writerow(["" if value is None else value for value in values])
    return text.getvalue()


def _metric(metric: str | Metric | None) -> tuple[str, Metric | None]:
    if isinstance(metric, str):
        return load_metric(metric)
    return getattr(metric, "__name__", "metric"), metric


def _opened(tallies: Sequence[_Tally], data: object, options: Data) -> dict[Inputs, Samples]:
    """The data as each model takes it; models with the same inputs share it."""
    kinds = {tally.predictor.inputs: tally.predictor.model for tally in tallies}
    opened = {inputs: open_data(model, options, data) for inputs, model in kinds.items()}
    if len(opened) > 1 and not all(samples.repeatable for samples in opened.values()):
        raise DataError(
            "The models have different inputs, and this data can be read only once.",
            hint="Pass a list or a folder.",
        )
    return opened


def _together(tallies: Sequence[_Tally], opened: Mapping[Inputs, Samples]) -> Iterator[EvaluationItem]:
    """Each item of the data, with its origin, for every model."""
    for items in zip(*(samples.named() for samples in opened.values()), strict=True):
        by_inputs = {inputs: sample for inputs, (_, sample) in zip(opened, items, strict=True)}
        yield EvaluationItem(items[0][0], tuple(by_inputs[tally.predictor.inputs] for tally in tallies))


def _seen_by(tallies: Sequence[_Tally], opened: Mapping[Inputs, Samples]) -> list[Samples]:
    return [opened[tally.predictor.inputs] for tally in tallies]


def _labelled_rows(first: Look, tally: _Tally, truth: Labels, metric: object) -> int:
    if truth.known and metric is None and not first.classes:
        raise DataError(
            "The first output is not class scores, so that labels cannot be used.",
            where=f"{tally.predictor.name}, output '{tally.predictor.outputs[0]}'",
            observed=f"shape {list(first.shape)}",
            expected="[rows, classes]",
            hint="Give a metric of your own: --metric file.py:function.",
        )
    return first.rows


def _score(
    tally: _Tally, first: _Tally, metric: tuple[str, Metric | None], labels: list[Any] | None
) -> ModelScore:
    name, function = metric
    rows, predictor, is_first = tally.rows, tally.predictor, tally is first
    judged = labels is not None and rows > 0
    return ModelScore(
        model=predictor.name,
        file_bytes=predictor.file_bytes,
        rows=rows,
        top1=tally.right / rows if judged else None,
        top5=tally.near / rows if judged and tally.classes > TOP else None,
        agreement=None if is_first or not rows else tally.same / rows,
        sqnr_db=None if is_first or not tally.close.count else tally.close.sqnr_db,
        cosine=None if is_first or not tally.close.count else tally.close.cosine,
        metric={} if function is None else scores(name, function, tally.kept, labels),
        seconds=tally.seconds,
    )
