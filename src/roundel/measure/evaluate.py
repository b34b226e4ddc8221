"""`roundel.evaluate`: several models over one set of data, in one pass, or two folders of results."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Unpack

from roundel.data import Samples
from roundel.data.lint import record_findings
from roundel.data.shards import SIZE, SampleDigest
from roundel.errors import DataError, ModelError, RecipeError
from roundel.measure.boxes import BoxLabels, DetectionScores
from roundel.measure.detection import NMS_IOU, BoxReader
from roundel.measure.folders import FolderScores, evaluate_folders
from roundel.measure.labels import Labels, check_labels
from roundel.measure.runner import PackedPredictor, Predictor
from roundel.measure.scores import (
    TOP,
    Look,
    Metric,
    ScoreTally,
    look,
    named_metric,
    paired_margin,
    scores,
)
from roundel.measure.types import ModelScore
from roundel.model.files import write_text
from roundel.model.structure import ModelSource
from roundel.options import DataWords, no_data, takes_data_words
from roundel.outputs import metric_file, refuse_overwriting
from roundel.plain import csv_text
from roundel.recipe.load import record_paths
from roundel.recipe.settings import Data
from roundel.remembered import Remembered
from roundel.stages import open_data
from roundel.twin import twin_of
from roundel.types import Array, Arrays, InputSpec, Listener, Sample, below, heard_by
from roundel.work.checkpoints import open_store
from roundel.work.executors import Executor, Ready, Work, mapped

Inputs = tuple[InputSpec, ...]
TASKS = ("classification", "detection")
Item = tuple[str, tuple[Sample, ...]]
"""The file that an item of the data came from, and the item as each model takes it."""


def evaluate_models(
    models: Sequence[ModelSource],
    data: object,
    *,
    labels: object = None,
    metric: str | Metric | None = None,
    task: str = "classification",
    decoder: str | None = None,
    nms_iou: float = NMS_IOU,
    as_npu: str | None = None,
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
            either (.npy, .npz, .json, .csv, .txt), 'folders', or 're:REGEX'. For detection: a JSON file of
            boxes, or what it would hold.
        metric: a function, 'module:function' or 'file.py:function'; see docs/evaluate.md.
        task: classification, or detection: mAP with labels, and the F1 of boxes against the first model's.
        decoder: of detection: ssd, yolov5, yolox or yolov8; else as the outputs' shapes say.
        nms_iou: of detection: of two boxes of one class that overlap by more, the weaker one goes.
        as_npu: phx or hpt: compute the quantized models with this NPU's arithmetic.
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
    _check_task(task, decoder, nms_iou, metric)
    work = Work(executor, open_store(checkpoint, resume=resume))
    predictors = [Predictor(model, as_npu=as_npu) for model in models]
    if as_npu is not None and all(predictor.twin is None for predictor in predictors):
        twin_of(models[-1], as_npu)  # float models have no integers: says so
    run = _Run(predictors, _opened(predictors, data, options or Data()), work, listener)
    if task == "detection":
        reader = BoxReader.of(predictors[0].model, decoder, nms_iou)
        return _detection(run, reader, labels)
    truth = Labels(labels, Path(data) if isinstance(data, str | Path) else None)
    return _classification(run, truth, metric)


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Models, the data as each of them takes it, and where they run."""

    predictors: Sequence[Predictor]
    opened: Mapping[Inputs, Samples]
    work: Work
    listener: Listener | None

    def looks(
        self, *, keep: bool, reader: BoxReader | None = None
    ) -> Generator[tuple[str, list[Look]], None, None]:
        """The origin of each item with every model's look at it; to be closed, for the live line's sake."""
        with heard_by(self.listener) as told:
            told.step("evaluate", next(iter(self.opened.values())).count)
            items = _together(self.predictors, self.opened)
            looked = _looked_at(self.predictors, items, self.work, keep=keep, reader=reader)
            for done, item in enumerate(looked, 1):
                yield item
                told.advance(done)

    def scores(
        self, tallies: Sequence[ScoreTally], own: Sequence[Mapping[str, float]], *, judged: bool
    ) -> tuple[ModelScore, ...]:
        """Of every model."""
        return tuple(
            _score(predictor, tally, metric, self.opened[predictor.inputs], judged=judged)
            for predictor, tally, metric in zip(self.predictors, tallies, own, strict=True)
        )


def _classification(run: _Run, truth: Labels, metric: str | Metric | None) -> tuple[ModelScore, ...]:
    name, function = named_metric(metric)
    tallies, kept = [ScoreTally() for _ in run.predictors], list[list[int] | None]()
    with closing(run.looks(keep=function is not None)) as looked:
        for origin, looks in looked:
            if truth.known and metric is None and not looks[0].classes:
                raise _no_classes(run.predictors[0], looks[0])
            labels = truth.of(origin, looks[0].rows)
            if labels is not None and metric is None:
                check_labels(labels, looks[0].classes, origin)
            kept.append(labels)
            for tally, one in zip(tallies, looks, strict=True):
                tally.add(one, labels, looks[0])
    truths = kept if truth.known else None
    own = [{} if function is None else scores(name, function, t.kept, truths) for t in tallies]
    return run.scores(tallies, own, judged=truth.known)


def _detection(run: _Run, reader: BoxReader, labels: object) -> tuple[ModelScore, ...]:
    truth = None if labels is None else BoxLabels(labels)
    found = DetectionScores(truth, [run.opened[p.inputs].images for p in run.predictors])
    tallies = [ScoreTally() for _ in run.predictors]
    with closing(run.looks(keep=False, reader=reader)) as looked:
        for origin, looks in looked:
            found.add(origin, [one.outputs or {} for one in looks])
            for tally, one in zip(tallies, looks, strict=True):
                tally.add(replace(one, outputs=None))
    judged = run.scores(tallies, found.of_models(), judged=False)
    return tuple(replace(score, rows=found.count) for score in judged)


def check_judging(data: object, labels: object, task: str) -> None:
    """Fail before any work where accuracy is asked for and cannot be measured.

    Raises:
        RecipeError: labels came without data to judge by, or there is no such task.
    """
    _check_task(task, None, NMS_IOU, None)
    if data is None and labels is not None:
        raise RecipeError(
            "Labels are of the data to judge by, and there are none.",
            where="--labels",
            expected="--eval-data DIR, too",
        )


def _check_task(task: str, decoder: str | None, nms_iou: float, metric: str | Metric | None) -> None:
    if task not in TASKS:
        raise RecipeError.unknown(f"There is no task '{task}'.", task, TASKS, where="--task")
    if task == "detection" and metric is not None:
        raise RecipeError("Detection has a metric of its own.", where="--metric", expected="no --metric")
    if task != "detection" and (decoder is not None or nms_iou != NMS_IOU):
        raise RecipeError(
            "A decoder and --nms-iou are for boxes, and the task is another one.",
            observed=f"task {task}",
            expected="--task detection",
        )


@takes_data_words
def evaluate(
    models: Sequence[ModelSource] = (),
    data: object = None,
    *,
    options: Data | None = None,
    baseline: str | Path | None = None,
    quantized: str | Path | None = None,
    labels: object = None,
    metric: str | Metric | None = None,
    task: str = "classification",
    decoder: str | None = None,
    nms_iou: float = NMS_IOU,
    as_npu: str | None = None,
    csv: str | Path | None = None,
    executor: Executor | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    listener: Listener | None = None,
    **words: Unpack[DataWords],
) -> FolderScores | tuple[ModelScore, ...]:
    """Judge results: two folders file by file, or models side by side on data.

    Args:
        models: the float model first; the others are compared with it. Or two folders of results.
        data: whatever `roundel.quantize` takes, with the words from `samples` to `letterbox`; what is not
            said is as in the record beside a model: its evaluation data with their labels, else its own data.
        options: the words of the data as one object.
        baseline: instead of models: a folder with results of the float model, .jpg, .png or .npy.
        quantized: and one with those of the quantized model, under the same names.
        labels: None, one class number for each row, a mapping from file name to class number, a file of
            either (.npy, .npz, .json, .csv, .txt), 'folders', or 're:REGEX'. For detection: a JSON file of
            boxes, or what it would hold.
        metric: a function, 'module:function' or 'file.py:function'; see docs/evaluate.md.
        task: classification, or detection: mAP with labels, and the F1 of boxes against the first model's.
        decoder: of detection: ssd, yolov5, yolox or yolov8; else as the outputs' shapes say.
        nms_iou: of detection: of two boxes of one class that overlap by more, the weaker one goes.
        as_npu: phx or hpt: compute the quantized models with this NPU's arithmetic, as `roundel.npu_session`.
        csv: also write the scores of each file (or model) there.
        executor: where the models run, from `roundel.executor(…)`; this process when not given.
        checkpoint: a folder that holds what is done, shard by shard.
        resume: go on from the checkpoint where there is one; the scores are those of a run without a break.
        listener: told about progress.

    Raises:
        RoundelError: a model, a folder, the data, the labels or the metric do not fit.
    """
    folders = _result_folders(models, baseline, quantized)
    if folders is not None:
        if executor is not None or checkpoint is not None or resume or as_npu is not None:
            raise RecipeError(
                "Folders of results are compared at once, in this process.",
                expected="no --executor, --checkpoint, --resume or --as-npu",
            )
        refuse_overwriting({"table": csv}, {"results": folders})
        scores = evaluate_folders(*folders, listener=listener)
        if csv is not None:
            write_text(Path(csv), scores.to_csv())
        return scores
    known = Remembered.beside(models)
    data, labels, task = known.judged(data, labels, task)
    if data is None:
        raise no_data()
    read = {"models": list(models), "models' records": record_paths(models)}
    judging = {"data": data, "labels": labels, "metric": metric_file(metric)}
    refuse_overwriting({"table": csv}, {**read, **judging})
    judged = evaluate_models(
        models,
        data,
        labels=labels,
        metric=metric,
        task=task,
        decoder=decoder,
        nms_iou=nms_iou,
        as_npu=as_npu,
        options=known.settings(options, words),
        executor=executor,
        checkpoint=checkpoint,
        resume=resume,
        listener=listener,
    )
    if csv is not None:  # the user's metrics have columns of their own
        plain = [f.name for f in fields(ModelScore) if f.name not in ("metric", "notes")]
        rows = [{**{name: getattr(score, name) for name in plain}, **score.metric} for score in judged]
        write_text(Path(csv), csv_text(rows))
    return judged


def _result_folders(
    models: Sequence[ModelSource], baseline: str | Path | None, quantized: str | Path | None
) -> tuple[str | Path, str | Path] | None:
    """Two folders of results, or None where models are to run."""
    if baseline is None and quantized is None:
        paths = [model for model in models if isinstance(model, str | Path) and Path(model).is_dir()]
        if len(paths) == len(models) == 2:
            return paths[0], paths[1]
        if not models:
            raise RecipeError(
                "There is nothing to evaluate.",
                expected="--baseline DIR --quantized DIR, or MODEL … --data DIR",
            )
        return None
    if baseline is None or quantized is None or models:
        raise RecipeError(
            "Two folders are compared, or models are run; this is something in between.",
            observed=" ".join(map(str, models)) or "one folder",
            expected="--baseline DIR --quantized DIR, or MODEL … --data DIR",
        )
    return baseline, quantized


def _opened(predictors: Sequence[Predictor], data: object, options: Data) -> dict[Inputs, Samples]:
    """The data as each model takes it; models with the same inputs share it."""
    kinds = {predictor.inputs: predictor.model for predictor in predictors}
    opened = {inputs: open_data(model, options, data) for inputs, model in kinds.items()}
    if len(opened) > 1 and not all(samples.repeatable for samples in opened.values()):
        raise DataError(
            "The models have different inputs, and this data can be read only once.",
            hint="Pass a list or a folder.",
        )
    return opened


def _together(predictors: Sequence[Predictor], opened: Mapping[Inputs, Samples]) -> Iterator[Item]:
    """Each item of the data, with its origin, for every model."""
    for items in zip(*(samples.named() for samples in opened.values()), strict=True):
        # A reader may reuse its arrays. Models that share an input share the copy.
        copies = {
            inputs: {name: array.copy() for name, array in sample.items()}
            for inputs, (_, sample) in zip(opened, items, strict=True)
        }
        yield items[0][0], tuple(copies[predictor.inputs] for predictor in predictors)


def _looked_at(
    predictors: Sequence[Predictor],
    items: Iterable[Item],
    work: Work,
    *,
    keep: bool,
    reader: BoxReader | None,
) -> Iterator[tuple[str, list[Look]]]:
    """The origin of each item with every model's look at it, in the order of the data."""

    def key() -> dict[str, str]:
        models = {f"model {number}": predictor.digest() for number, predictor in enumerate(predictors)}
        return {**models, "kept outputs": "all" if keep else "none" if reader is None else str(reader)}

    task, parts = _Task(tuple(predictors), keep, reader), _parts(items, digests=work.store is not None)
    read = [] if reader is None else list(reader.KEPT)
    names = [list(predictor.outputs) if keep else read for predictor in predictors]
    for part, arrays in mapped(work, task, parts, "evaluate", key):
        for place, (origin, _) in enumerate(part.items):
            looks = (below(arrays, f"{place}.{number}.") for number in range(len(names)))
            yield origin, [Look.from_arrays(one, kept) for one, kept in zip(looks, names, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    number: int
    items: tuple[Item, ...]
    digest: str


def _parts(items: Iterable[Item], *, digests: bool) -> Iterator[_Part]:
    rest, number = iter(items), 0
    while some := tuple(islice(rest, SIZE)):
        digest = SampleDigest()
        for sample in (sample for _, samples in some for sample in samples if digests):
            digest.update(sample)
        yield _Part(number, some, digest.hexdigest())
        number += 1


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    models: tuple[Predictor | PackedPredictor, ...]
    keep: bool
    reader: BoxReader | None

    def open(self, cores: int) -> Ready[_Part]:
        predictors = [model.open(cores) for model in self.models]
        return Ready(lambda part: _part_arrays(predictors, part, keep=self.keep, reader=self.reader))


def _part_arrays(
    predictors: Sequence[Predictor], part: _Part, *, keep: bool, reader: BoxReader | None
) -> Arrays:
    """Every model's look at each item of a part, under the item's place and the model's number."""
    arrays: Arrays = {}
    for place, (_, samples) in enumerate(part.items):
        first: list[Array] = []
        for number, (predictor, sample) in enumerate(zip(predictors, samples, strict=True)):
            started = time.perf_counter()
            results = predictor.run(sample, part.number * SIZE + place)
            seconds = time.perf_counter() - started
            one = look(results, first, keep=keep, seconds=seconds)
            if reader is not None:
                one = replace(one, outputs=reader.read(sample, results))
            arrays |= {f"{place}.{number}.{key}": array for key, array in one.arrays().items()}
            first = first or [results[predictor.outputs[0]]]
    return arrays


def _no_classes(predictor: Predictor, first: Look) -> DataError:
    return DataError(
        "The first output is not class scores, so that labels cannot be used.",
        where=f"{predictor.name}, output '{predictor.outputs[0]}'",
        observed=f"shape {list(first.shape)}",
        expected="[rows, classes]",
        hint="Give a metric of your own: --metric file.py:function.",
    )


def _score(
    predictor: Predictor, tally: ScoreTally, metric: Mapping[str, float], data: Samples, *, judged: bool
) -> ModelScore:
    rows, judged = tally.rows, judged and tally.rows > 0
    close = tally.close[0] if tally.close else None  # the first model is compared with none
    return ModelScore(
        model=predictor.name,
        file_bytes=predictor.file_bytes,
        rows=rows,
        top1=tally.right / rows if judged else None,
        top5=tally.near / rows if judged and tally.classes > TOP else None,
        agreement=None if close is None or not rows else tally.same / rows,
        sqnr_db=close.sqnr_db if close is not None and close.count else None,
        cosine=close.cosine if close is not None and close.count else None,
        metric=metric,
        seconds=tally.seconds,
        notes=(
            *(str(finding) for finding in record_findings(predictor.path, data)),
            *(predictor.twin.lines() if predictor.twin is not None else ()),
        ),
        margin=None if close is None or not judged else paired_margin(tally.lost, tally.won, rows),
    )
