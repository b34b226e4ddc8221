"""Functions that look at models and judge them, each with the options of the command of its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from roundel.errors import OutputError, RecipeError, SelectionError, did_you_mean
from roundel.measure.compare import compare_models
from roundel.measure.evaluate import ModelScore, evaluate_models, scores_csv
from roundel.measure.folders import FolderScores, evaluate_folders
from roundel.measure.layers import Sensitivity
from roundel.measure.lint import DataReport, examine_data
from roundel.measure.runner import Inference, save_outputs
from roundel.measure.scores import Metric
from roundel.measure.sensitivity import rank_layers
from roundel.measure.types import Comparison, to_csv
from roundel.model.files import same_file, write_text
from roundel.model.structure import ModelSource
from roundel.options import (
    DEFAULT_PRESET,
    Numbers,
    Size,
    chosen_recipe,
    data_settings,
    image_words,
    recipe_changes,
)
from roundel.outputs import metric_file, record_path, refuse_overwriting
from roundel.plan import QuantPlan, build_plan
from roundel.recipe.load import RecipeSource, load_recipe
from roundel.recipe.settings import Data
from roundel.reporting import DEVICE, write_report
from roundel.request import changed
from roundel.rules import CheckReport, check_model
from roundel.stages import prepare
from roundel.types import Listener
from roundel.work.executors import Executor


def check(
    model: ModelSource,
    *,
    preset: str | None = None,
    recipe: RecipeSource | None = None,
    device: str = "stx",
) -> CheckReport:
    """Say what will run on the NPU and what stands in the way. Needs no NPU and no data.

    Args:
        model: an ONNX file, bytes, a ModelProto or an onnx-ir model; float, or quantized by any tool.
        preset: the format to judge; without it a8w8 for a float model, and what a quantized model shows.
        recipe: the same, as a file, a mapping or a Recipe.
        device: phx, hpt, stx, stx-halo or krk.

    Raises:
        RoundelError: the model cannot be read, or there is no such preset or device.
    """
    return check_model(model, preset=chosen_recipe(preset, recipe), device=device)


def explain(
    model: ModelSource,
    *,
    preset: str | None = None,
    recipe: RecipeSource | None = None,
    tensor: str | None = None,
    exclude: Sequence[str] = (),
    include: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
) -> QuantPlan:
    """What every tensor would become, and why. Needs no data.

    Args:
        model: the float model.
        preset: a preset's name; a8w8 when neither this nor a recipe is given.
        recipe: a recipe file, a mapping or a Recipe.
        tensor: only this one.
        exclude: nodes that stay float, as `roundel.quantize` takes them.
        include: only these are quantized.
        changes: recipe values that differ from the recipe's own.

    Raises:
        SelectionError: the model has no such tensor.
        RoundelError: the model or the recipe is wrong.
    """
    tree = changed(recipe_changes(changes, include), None, exclude)
    chosen = load_recipe(chosen_recipe(preset, recipe) or DEFAULT_PRESET, tree)
    plan = build_plan(prepare(model, chosen).model, chosen)
    if tensor is None:
        return plan
    known = [*plan.tensors, *plan.kept_float]
    if tensor not in known:
        raise SelectionError(f"The model has no float tensor '{tensor}'.", hint=did_you_mean(tensor, known))
    return replace(
        plan,
        tensors={name: item for name, item in plan.tensors.items() if name == tensor},
        kept_float={name: why for name, why in plan.kept_float.items() if name == tensor},
    )


def infer(
    model: ModelSource,
    data: object,
    out: str | Path,
    *,
    samples: int | None = None,
    mean: Numbers | None = None,
    std: Numbers | None = None,
    scale: str | None = None,
    resize: Size | None = None,
    crop: Size | None = None,
    layout: str | None = None,
    bgr: bool = False,
    options: Data | None = None,
    outputs: Sequence[str] = (),
    images: bool = False,
    listener: Listener | None = None,
) -> Inference:
    """Run a model, float or quantized, and save each output, named after its input.

    `cat.jpg` becomes `cat.npy` (`cat.png` with `images`); samples without a file are numbered from 0. A model
    with several outputs gets a sub-folder for each.

    Args:
        model: an ONNX file, a ModelProto, or an onnx-ir model.
        data: whatever `roundel.quantize` takes, with the words from `samples` to `bgr`.
        out: the folder to write to; it is created when it does not exist.
        options: the words of the data as one object, for example `result.record.recipe`'s.
        outputs: only these outputs.
        images: save pictures instead of arrays.
        listener: told about progress.

    Raises:
        RoundelError: the model, the data or an output does not fit.
    """
    settings = data_settings(options, image_words(mean, std, scale, resize, crop, layout, bgr), samples)
    if isinstance(data, str | Path) and same_file(Path(out), Path(data)):
        raise OutputError(
            "The outputs would overwrite the data.", where=out, hint="Choose another output folder."
        )
    return save_outputs(model, data, out, options=settings, outputs=outputs, images=images, listener=listener)


def evaluate(
    models: Sequence[ModelSource] = (),
    data: object = None,
    *,
    samples: int | None = None,
    mean: Numbers | None = None,
    std: Numbers | None = None,
    scale: str | None = None,
    resize: Size | None = None,
    crop: Size | None = None,
    layout: str | None = None,
    bgr: bool = False,
    options: Data | None = None,
    baseline: str | Path | None = None,
    quantized: str | Path | None = None,
    labels: object = None,
    metric: str | Metric | None = None,
    csv: str | Path | None = None,
    executor: Executor | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    listener: Listener | None = None,
) -> FolderScores | tuple[ModelScore, ...]:
    """Judge results: two folders file by file, or models side by side on data.

    Args:
        models: the float model first; the others are compared with it. Or two folders of results.
        data: whatever `roundel.quantize` takes, with the words from `samples` to `bgr`.
        options: the words of the data as one object.
        baseline: instead of models: a folder with results of the float model, .jpg, .png or .npy.
        quantized: and one with those of the quantized model, under the same names.
        labels: None, one class number for each row, a mapping from file name to class number, a file of
            either (.npy, .npz, .json, .csv, .txt), 'folders', or 're:REGEX'.
        metric: a function, 'module:function' or 'file.py:function'; see docs/evaluate.md.
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
        if executor is not None or checkpoint is not None or resume:
            raise RecipeError(
                "Folders of results are compared at once, in this process.",
                expected="no --executor, --checkpoint or --resume",
            )
        refuse_overwriting({"table": csv}, {"results": folders})
        scores = evaluate_folders(*folders, listener=listener)
        if csv is not None:
            write_text(Path(csv), scores.to_csv())
        return scores
    if data is None:
        raise _no_data()
    sources = {"models": list(models), "models' records": _records(models), "data": data, "labels": labels}
    refuse_overwriting({"table": csv}, {**sources, "metric": metric_file(metric)})
    judged = evaluate_models(
        models,
        data,
        labels=labels,
        metric=metric,
        options=data_settings(options, image_words(mean, std, scale, resize, crop, layout, bgr), samples),
        executor=executor,
        checkpoint=checkpoint,
        resume=resume,
        listener=listener,
    )
    if csv is not None:
        write_text(Path(csv), scores_csv(judged))
    return judged


def compare(
    float_model: ModelSource,
    quantized_model: ModelSource,
    data: object,
    *,
    samples: int | None = None,
    mean: Numbers | None = None,
    std: Numbers | None = None,
    scale: str | None = None,
    resize: Size | None = None,
    crop: Size | None = None,
    layout: str | None = None,
    bgr: bool = False,
    options: Data | None = None,
    csv: str | Path | None = None,
    report: str | Path | None = None,
    device: str | None = None,
    executor: Executor | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    listener: Listener | None = None,
) -> Comparison:
    """Run both models over the data once and compare every tensor that both have.

    Args:
        float_model: an ONNX file, a ModelProto, or an onnx-ir model.
        quantized_model: a Q/DQ model that any tool has made from it.
        data: whatever `roundel.quantize` takes, with the words from `samples` to `bgr`.
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
    settings = data_settings(options, image_words(mean, std, scale, resize, crop, layout, bgr), samples)
    models = {"float model": float_model, "quantized model": quantized_model}
    records = {"quantized model's record": _records([quantized_model])}
    refuse_overwriting({"table": csv, "report": report}, {**models, **records, "data": data})
    if report is None:
        found = compare_models(
            float_model,
            quantized_model,
            data,
            options=settings,
            executor=executor,
            checkpoint=checkpoint,
            resume=resume,
            listener=listener,
        )
    else:
        found = write_report(
            report,
            float_model,
            quantized_model,
            data,
            options=settings,
            device=device or DEVICE,
            executor=executor,
            checkpoint=checkpoint,
            resume=resume,
            listener=listener,
        )
    if csv is not None:
        write_text(Path(csv), to_csv(found))
    return found


def sensitivity(
    model: ModelSource,
    *,
    preset: str | None = None,
    recipe: RecipeSource | None = None,
    data: object = None,
    samples: int | None = None,
    mean: Numbers | None = None,
    std: Numbers | None = None,
    scale: str | None = None,
    resize: Size | None = None,
    crop: Size | None = None,
    layout: str | None = None,
    bgr: bool = False,
    exclude: Sequence[str] = (),
    include: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
    look: int = 8,
    worst: int = 5,
    executor: Executor | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    listener: Listener | None = None,
) -> Sensitivity:
    """Rank the layers by what quantizing them costs at the output, and say what would help.

    Args:
        model: an ONNX file, a ModelProto, or an onnx-ir model. It is never changed.
        preset: a preset's name, with static integers; a8w8 when neither this nor a recipe is given.
        recipe: a recipe file, a mapping or a Recipe.
        data: calibration data, as `roundel.quantize` takes it, with the words from `samples` to `bgr`.
        exclude: nodes that stay float, as `roundel.quantize` takes them.
        include: only these are quantized.
        changes: recipe values that differ from the recipe's own, nested as in the file.
        look: samples that each layer is measured with.
        worst: how many layers, at most, get proposals, whose effect together is measured as well.
        executor: where it runs, from `roundel.executor(…)`; this process when not given.
        checkpoint: a folder that holds what is done: shards of the samples, and layers.
        resume: go on from the checkpoint where there is one; the result is that of a run without a break.
        listener: told about progress.

    Raises:
        RoundelError: something in the model, the data or the recipe is wrong.
    """
    tree = recipe_changes(changes, include, data=image_words(mean, std, scale, resize, crop, layout, bgr))
    return rank_layers(
        model,
        recipe=chosen_recipe(preset, recipe) or DEFAULT_PRESET,
        data=data,
        changes=changed(tree, samples, exclude),
        samples=look,
        worst=worst,
        executor=executor,
        checkpoint=checkpoint,
        resume=resume,
        listener=listener,
    )


def lint_data(
    model: ModelSource,
    data: object,
    *,
    samples: int | None = None,
    mean: Numbers | None = None,
    std: Numbers | None = None,
    scale: str | None = None,
    resize: Size | None = None,
    crop: Size | None = None,
    layout: str | None = None,
    bgr: bool = False,
    options: Data | None = None,
    against: object = None,
    against_options: Data | None = None,
    listener: Listener | None = None,
) -> DataReport:
    """Look for what would spoil a calibration: odd samples, wrong scaling or colours, too few samples.

    Args:
        model: the float model.
        data: whatever `roundel.quantize` takes, with the words from `samples` to `bgr`.
        options: the words of the data as one object.
        against: other data that should look the same (evaluation data).
        against_options: how those become samples; as for `data` when not given.
        listener: told about progress.

    Raises:
        RoundelError: the model or the data cannot be read.
    """
    return examine_data(
        model,
        data,
        options=data_settings(options, image_words(mean, std, scale, resize, crop, layout, bgr), samples),
        against=against,
        against_options=against_options,
        listener=listener,
    )


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


def _no_data() -> RecipeError:
    return RecipeError(
        "No data was given.",
        expected="--data DIR",
        hint="Or --random N for a first look, without any meaning for accuracy.",
    )


def _records(models: Sequence[object]) -> list[Path]:
    return [record_path(Path(model)) for model in models if isinstance(model, str | Path)]
