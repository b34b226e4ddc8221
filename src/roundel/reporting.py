"""Compare two models; and, in `write_report`, put all that is known about a result into one HTML file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from roundel.errors import DataError, RecipeError, RoundelError
from roundel.measure.compare import compare_models
from roundel.measure.evaluate import ModelScore
from roundel.measure.types import Comparison, to_csv
from roundel.model.files import write_text
from roundel.model.structure import ModelSource
from roundel.options import DataWords, data_settings, takes_data_words
from roundel.outputs import refuse_overwriting
from roundel.recipe.load import known_recipe, read_record, record_paths
from roundel.recipe.settings import Data, Recipe
from roundel.report.html import ReportContent, render
from roundel.result import QuantizeResult
from roundel.rules import CheckReport, check
from roundel.targets.npu import USUAL_DEVICE, device_named
from roundel.types import Listener
from roundel.work.checkpoints import open_store
from roundel.work.executors import Executor, Work

_SAMPLES = 32  # of a run's data: figures hardly move with more, and the comparison takes its time


@takes_data_words
def compare(
    float_model: ModelSource,
    quantized_model: ModelSource,
    data: object,
    *,
    options: Data | None = None,
    csv: str | Path | None = None,
    report: str | Path | None = None,
    device: str | None = None,
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
        data: whatever `roundel.quantize` takes, with the words from `samples` to `letterbox`.
        options: the words of the data as one object.
        csv: also write all tensors there.
        report: also write one HTML page with all of it, as `roundel.write_report` does.
        device: the NPU whose split the report predicts; stx when not given.
        executor: where it runs, from `roundel.executor(…)`; this process when not given.
        checkpoint: a folder that holds what is done, shard by shard.
        resume: go on from the checkpoint where there is one; the result is that of a run without a break.
        listener: told about progress.

    Raises:
        RoundelError: a model does not load, the two do not belong together, or the data does not fit.
    """
    if device is not None and report is None:
        raise RecipeError(
            "--device is for the report.", where=f"--device {device}", expected="--report FILE, too"
        )
    settings = data_settings(options, words)
    models = {"float model": float_model, "quantized model": quantized_model, "data": data}
    records = {"quantized model's record": record_paths([quantized_model])}
    refuse_overwriting({"table": csv, "report": report}, {**models, **records})
    if report is None:
        work = Work(executor, open_store(checkpoint, resume=resume))
        found = compare_models(float_model, quantized_model, data, settings, work=work, listener=listener)
    else:
        found = write_report(
            report,
            float_model,
            quantized_model,
            data,
            options=options,
            device=device or USUAL_DEVICE,
            executor=executor,
            checkpoint=checkpoint,
            resume=resume,
            listener=listener,
            **words,
        )
    if csv is not None:
        write_text(Path(csv), to_csv(found))
    return found


@takes_data_words
def write_report(
    path: str | Path,
    float_model: ModelSource,
    quantized: ModelSource | QuantizeResult,
    data: object,
    *,
    options: Data | None = None,
    device: str = USUAL_DEVICE,
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
        device: the NPU whose split is predicted.
        scores: of the float and the quantized model, from `roundel.evaluate_models`.
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
    device_named(device)  # a wrong name is an error, not a page without a prediction
    require_data(target, data)
    made = quantized.path if isinstance(quantized, QuantizeResult) else quantized
    models = {"float model": float_model, "quantized model": made, "data": data}
    refuse_overwriting({"report": target}, {**models, "quantized model's record": record_paths([made])})
    work = Work(executor, open_store(checkpoint, resume=resume))
    with _file_of(quantized) as (source, record):
        recipe = known_recipe(record)
        used = Data() if recipe is None else recipe.data
        moderate = used.model_copy(update={"samples": min(used.samples or _SAMPLES, _SAMPLES)})
        settings = data_settings(options or moderate, words)
        found = compare_models(float_model, source, data, settings, work=work, listener=listener)
        placed, refused = _placement(source, recipe, device)
    if isinstance(quantized, QuantizeResult) and quantized.path is None:
        found = replace(found, quantized_model="in memory")
    plain = [score.to_dict() for score in scores]
    write_text(target, render(ReportContent(found, record, placed, refused, plain)))
    return found


def require_data(path: str | Path, data: object) -> None:
    """Fail now, not after minutes of work, where a report has nothing to compare on."""
    if data is None:
        raise DataError(
            "A report compares both models on samples, and there is no data.",
            where=path,
            hint="Pass data=… (command line: --data DIR), or RandomData() (--random N) for a first look.",
        )


@contextmanager
def _file_of(quantized: ModelSource | QuantizeResult) -> Iterator[tuple[ModelSource, dict[str, Any] | None]]:
    """The quantized model and its record; a run that wrote no file gets one for as long as it takes.

    The comparison needs the record beside the file: it tells how the float model was prepared.
    """
    if not isinstance(quantized, QuantizeResult):
        known = isinstance(quantized, str | Path)
        yield quantized, read_record(Path(quantized)) if known else None  # type: ignore[arg-type]
    elif quantized.path is not None:
        yield quantized.path, quantized.record.to_dict()
    else:
        with tempfile.TemporaryDirectory(prefix="roundel-") as folder:
            yield quantized.save(Path(folder) / "model.onnx"), quantized.record.to_dict()


def _placement(
    source: ModelSource, recipe: Recipe | None, device: str
) -> tuple[CheckReport | None, str | None]:
    """The predicted split; or why there is none, which the page then says."""
    try:
        return check(source, recipe=recipe, device=device), None
    except RoundelError as error:
        return None, " ".join(text for text in (error.what, error.hint) if text)
