"""Compare two models; and, in `write_report`, put all that is known about a result into one HTML file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Unpack

from roundel.errors import DataError
from roundel.measure.compare import compare_models
from roundel.measure.types import Comparison, ModelScore, to_csv
from roundel.model.files import write_text
from roundel.model.structure import ModelSource
from roundel.options import DataWords, no_data, takes_data_words
from roundel.outputs import refuse_overwriting
from roundel.plain import to_plain
from roundel.recipe.load import record_paths
from roundel.recipe.settings import Data
from roundel.remembered import Remembered
from roundel.report.html import ReportContent, render
from roundel.report.verdict import Known, verdict
from roundel.result import Judging, QuantizeResult
from roundel.rules.report import finished, placed
from roundel.targets.npu import USUAL_DEVICE, device_named
from roundel.types import Listener
from roundel.work.checkpoints import open_store
from roundel.work.executors import Executor, Work

_SAMPLES = 32  # of a run's data: figures hardly move with more, and the comparison takes its time


@takes_data_words
def compare(
    float_model: ModelSource,
    quantized_model: ModelSource,
    data: object = None,
    *,
    options: Data | None = None,
    eval_data: object = None,
    labels: object = None,
    task: str = "classification",
    csv: str | Path | None = None,
    report: str | Path | None = None,
    device: str | None = None,
    as_npu: str | None = None,
    executor: Executor | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    listener: Listener | None = None,
    **words: Unpack[DataWords],
) -> Comparison:
    """Run both models over the data once and compare every tensor that both have.

    Args:
        float_model: an ONNX file, a ModelProto, or an onnx-ir model.
        quantized_model: a Q/DQ model that any tool has made from it.
        data: whatever `roundel.quantize` takes, with the words from `samples` to `letterbox`; what is not
            said is as in the record beside the quantized model, and of its data 32 samples.
        options: the words of the data as one object.
        eval_data: also judge both models on these data, as `roundel.quantize` does.
        labels: of these data, as `roundel.evaluate` takes them.
        task: of these data: classification or detection.
        csv: also write all tensors there.
        report: also write one HTML page with all of it, as `roundel.write_report` does.
        device: the NPU whose split is predicted; the run's, else stx.
        as_npu: phx or hpt: compute the quantized model with this NPU's arithmetic (`roundel.npu_session`).
        executor: where it runs, from `roundel.executor(…)`; this process when not given.
        checkpoint: a folder that holds what is done, shard by shard.
        resume: go on from the checkpoint where there is one; the result is that of a run without a break.
        listener: told about progress.

    Raises:
        RoundelError: a model does not load, the two do not belong together, or the data does not fit.
    """
    known = Remembered.beside([quantized_model])
    given = data if data is not None else known.data()
    if given is None:
        raise no_data()
    judging = _judging(known, eval_data, labels, task)
    read = {"float model": float_model, "quantized model": quantized_model, "data": given}
    read |= {"quantized model's record": record_paths([quantized_model])}
    read |= {"evaluation data": eval_data, "labels": labels}
    refuse_overwriting({"table": csv, "report": report}, read)
    settings = known.settings(options, words)
    if (report is not None or data is None) and options is None:
        settings = _moderate(settings)
    work = Work(executor, open_store(checkpoint, resume=resume))
    asked = _Asked(known, settings, device, as_npu, work, listener, judging)
    content = _compared(float_model, quantized_model, given, asked)
    if report is not None:
        write_text(Path(report), render(content))
    if csv is not None:
        write_text(Path(csv), to_csv(content.comparison))
    return content.comparison


@takes_data_words
def write_report(
    path: str | Path,
    float_model: ModelSource,
    quantized: ModelSource | QuantizeResult,
    data: object,
    *,
    options: Data | None = None,
    device: str | None = None,
    as_npu: str | None = None,
    scores: Sequence[ModelScore] = (),
    executor: Executor | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    listener: Listener | None = None,
    **words: Unpack[DataWords],
) -> Comparison:
    """Write one self-contained HTML page about a quantized model.

    Args:
        path: the file to write.
        float_model: an ONNX file, a ModelProto, or an onnx-ir model.
        quantized: what `roundel.quantize` returned, or a Q/DQ model that any tool has made.
        data: whatever `roundel.quantize` takes, with the words from `samples` to `letterbox`; by default as
            in the run that made the model, and at most 32 samples.
        options: these words as one object.
        device: the NPU whose split is predicted; the run's, else stx.
        as_npu: as of `roundel.compare`.
        scores: of the float and the quantized model, from `roundel.evaluate_models`; else the run's own.
        executor: where the comparison runs, from `roundel.executor(…)`; this process when not given.
        checkpoint: a folder that holds what is done, shard by shard.
        resume: go on from the checkpoint where there is one.
        listener: told about progress.

    Returns:
        The comparison that the page shows.

    Raises:
        RoundelError: a model does not load, the two do not belong together, or the data does not fit.
    """
    target = Path(path)
    device_named(device or USUAL_DEVICE)  # a wrong name is an error, not a page without a prediction
    require_data(target, data)
    made = quantized.path if isinstance(quantized, QuantizeResult) else quantized
    models = {"float model": float_model, "quantized model": made, "data": data}
    refuse_overwriting({"report": target}, {**models, "quantized model's record": record_paths([made])})
    work = Work(executor, open_store(checkpoint, resume=resume))
    with _file_of(quantized) as source:
        known = Remembered.beside([source])
        settings = known.settings(options, words)
        moderate = settings if options is not None else _moderate(settings)
        asked = _Asked(known, moderate, device, as_npu, work, listener)
        if isinstance(quantized, QuantizeResult):
            asked = replace(asked, result=quantized)
        content = _compared(float_model, source, data, replace(asked, scores=tuple(scores)))
    write_text(target, render(content))
    return content.comparison


def require_data(path: str | Path, data: object) -> None:
    """Fail now, not after minutes of work, where a report has nothing to compare on."""
    if data is None:
        raise DataError(
            "A report compares both models on samples, and there is no data.",
            where=path,
            hint="Pass data=… (command line: --data DIR), or RandomData() (--random N) for a first look.",
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """How two models are to be compared, and what is known before.

    Attributes:
        known: the record beside the quantized model.
        settings: how files become samples.
        device: the NPU whose split is predicted, where one was named.
        as_npu: whose arithmetic the quantized model is computed with.
        work: where it runs.
        listener: told about progress.
        judging: data with labels, where both models are to be judged.
        scores: of both, where they have been.
        result: the run, where it was this very program's: the page says the same as its summary.
    """

    known: Remembered
    settings: Data
    device: str | None
    as_npu: str | None = None
    work: Work = field(default_factory=lambda: Work(None, None))
    listener: Listener | None = None
    judging: Judging | None = None
    scores: tuple[ModelScore, ...] = ()
    result: QuantizeResult | None = None


def _compared(float_model: ModelSource, source: ModelSource, data: object, asked: _Asked) -> ReportContent:
    """Everything that is known about the two."""
    known, result, listener = asked.known, asked.result, asked.listener
    found = compare_models(
        float_model, source, data, asked.settings, as_npu=asked.as_npu, work=asked.work, listener=listener
    )
    scores = asked.scores or (() if result is None else result.record.scores)
    if asked.judging is not None:
        settings = asked.settings.model_copy(update={"samples": None})
        scores = asked.judging.scores([float_model, source], settings, listener)
    device = asked.device or known.device or USUAL_DEVICE
    checked = finished(source, known.recipe, device)
    if result is not None and result.path is None:
        found = replace(found, quantized_model="in memory")
    if result is not None and not asked.scores:
        answers = result.record.verdict
    else:
        npu = placed(checked, float_model, known.recipe, device, known.device)
        answers = verdict(_known((float_model, source), found, scores, npu))
    found = replace(found, scores=scores, verdict=answers)
    refused = checked if isinstance(checked, str) else None
    record = known.record or None
    plain = [score.to_dict() for score in scores]
    return ReportContent(found, record, None if isinstance(checked, str) else checked, refused, plain)


def _known(
    models: tuple[ModelSource, ModelSource],
    found: Comparison,
    scores: Sequence[ModelScore],
    npu: dict[str, object],
) -> Known:
    before, after = (str(model) if isinstance(model, str | Path) else None for model in models)
    record = Remembered.beside([after]).record
    told = record.get("recipe")
    outputs = [
        {"name": out.name, "sqnr_db": out.difference.sqnr_db, "same_top": out.same_top}
        for out in found.outputs
    ]
    return Known(
        float_model=before,
        model=after,
        outputs=outputs,
        scores=to_plain(list(scores)),
        samples=found.samples,
        random=bool(found.data.get("random")),
        data=None if found.data.get("path") is None else str(found.data["path"]),
        npu=npu,
        recipe={key: told.get(key) for key in ("name", "effort")} if isinstance(told, dict) else None,
    )


def _judging(known: Remembered, eval_data: object, labels: object, task: str) -> Judging | None:
    """Data to judge by, where that was asked for; labels alone are for the data of the record."""
    if eval_data is None and labels is None:
        return None
    data = eval_data if eval_data is not None else known.judging()[0]
    return Judging.of(*(known.judged(data, labels, task) if data is not None else (None, labels, task)))


def _moderate(settings: Data) -> Data:
    return settings.model_copy(update={"samples": min(settings.samples or _SAMPLES, _SAMPLES)})


@contextmanager
def _file_of(quantized: ModelSource | QuantizeResult) -> Iterator[ModelSource]:
    """The quantized model; a run that wrote no file gets one for as long as it takes.

    The comparison needs the record beside the file: it tells how the float model was prepared.
    """
    if not isinstance(quantized, QuantizeResult):
        yield quantized
    elif quantized.path is not None:
        yield quantized.path
    else:
        with tempfile.TemporaryDirectory(prefix="roundel-") as folder:
            yield quantized.save(Path(folder) / "model.onnx")
