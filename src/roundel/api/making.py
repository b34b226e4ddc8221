"""Functions that make models, each with the options of the command of its name.

They bring what a caller says into the form that the rooms take, and refuse outputs that would cover what is
read. `preset` and `recipe` are two ways to name one recipe; the words from `samples` to `bgr` say how data
become samples and mean the same everywhere (docs/recipes.md, section data).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from roundel import pipeline
from roundel.forecasting import Forecast, expected_cost
from roundel.measure.scores import Metric
from roundel.model.files import write_text
from roundel.model.structure import ModelSource
from roundel.options import (
    DEFAULT_PRESET,
    Numbers,
    Size,
    chosen_recipe,
    image_words,
    recipe_changes,
)
from roundel.outputs import metric_file, model_targets, refuse_overwriting
from roundel.recipe.load import RecipeSource, dump_yaml
from roundel.reporting import DEVICE, require_data, write_report
from roundel.request import changed
from roundel.result import QuantizeResult
from roundel.torch import Exported, is_torch_source, opened
from roundel.trials.auto import climb, ladder_path
from roundel.trials.rungs import AutoResult, RungStep
from roundel.trials.search import SearchResult, run_search
from roundel.trials.study import Sampler, SpaceSource, Trial
from roundel.types import Listener
from roundel.work.executors import Executor


def quantize(
    model: Any,
    output: str | Path | None = None,
    *,
    preset: str | None = None,
    recipe: RecipeSource | None = None,
    data: object = None,
    samples: int | None = None,
    stats: str | Path | None = None,
    mean: Numbers | None = None,
    std: Numbers | None = None,
    scale: str | None = None,
    resize: Size | None = None,
    crop: Size | None = None,
    layout: str | None = None,
    bgr: bool = False,
    effort: str | None = None,
    device: str | None = None,
    device_exec: str | None = None,
    max_memory: str | int | None = None,
    exclude: Sequence[str] = (),
    include: Sequence[str] = (),
    exclude_subgraph: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
    half_weights: bool = False,
    strip_functions: bool = False,
    report: str | Path | None = None,
    example_inputs: object = None,
    dynamic_batch: bool = False,
    dynamic_shapes: Any = None,
    executor: Executor | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    listener: Listener | None = None,
    on_forecast: Callable[[Forecast], None] | None = None,
) -> QuantizeResult:
    """Quantize a float model.

    Args:
        model: an ONNX file, a ModelProto, or an onnx-ir model; or of PyTorch: a module, a torch.export
            program, a .pt2 file, or 'package.module:factory'. It is never changed.
        output: the file to write; a record `NAME.json` appears beside it. None keeps all in memory.
        preset: a preset's name in any case; a8w8 when neither this nor a recipe is given.
        recipe: a recipe file, a mapping, a Recipe, or a preset's name.
        data: calibration data: ONNX Runtime's CalibrationDataReader, any iterable of dicts or arrays, a
            DataLoader, a folder of images or .npy files, or `roundel.RandomData()`.
        samples: use at most this many samples.
        stats: a statistics file to reuse, or to write when it does not fit this model and data.
        mean: of images: subtracted, one number or one for each channel, in units of the scaled image.
        std: of images: divides, likewise.
        scale: of images: unit (pixels / 255) or raw.
        resize: of images: the short side, or (height, width).
        crop: of images: centre crop, a side or (height, width).
        layout: of images: nchw or nhwc; read from the model's input when not given.
        bgr: of images: blue first.
        effort: none (calibration only), fast or high; the recipe's own when not given.
        device: the NPU it is for (phx, stx, krk …): what helps placement there and is exact is applied, and
            what is left is listed in the record's notes.
        device_exec: where calibration and fine-tuning run: cpu, cuda (an error where it is missing), or auto,
            which takes a GPU if there is one; the record says what was chosen.
        max_memory: the most memory that this process may take: '2G', '512M' or bytes. With less, the same
            result comes from more passes and from temporary files. Each worker may take as much.
        exclude: nodes that stay float: names, globs, 're:REGEX' or 'op:TYPE'.
        include: only these are quantized; same words.
        exclude_subgraph: keep in float all between tensors: 'a,b->c,d'.
        changes: recipe values that differ from the recipe's own, nested as in the file or with dots:
            `{"weights.type": "int8"}`.
        half_weights: BF16 and FP16: constants in 16 bits, same numbers.
        strip_functions: leave out the bodies of AMD's operators.
        report: also write one HTML page about the result there, as `roundel.write_report` does.
        example_inputs: PyTorch: a tensor, a tuple of arguments, a dict by parameter name, or a list of such
            examples. The first is traced; on all of them the export must equal the module.
        dynamic_batch: PyTorch: leave the first dimension of all inputs open.
        dynamic_shapes: PyTorch: open dimensions in torch.export's notation.
        executor: where calibration runs, from `roundel.executor(…)`; this process when not given.
        checkpoint: a folder that holds what is done: each shard of the samples, each layer of the rest.
        resume: go on from the checkpoint where there is one; the file is that of a run without a break.
        listener: told about progress.
        on_forecast: hears what the run is expected to take, before it begins.

    Raises:
        RoundelError: something in the model, the data or the recipe is wrong; nothing was written.
    """
    chosen = chosen_recipe(preset, recipe) or DEFAULT_PRESET
    flags = {"half_weights": half_weights, "strip_functions": strip_functions}
    words = image_words(mean, std, scale, resize, crop, layout, bgr)
    tree = recipe_changes(changes, include, exclude_subgraph, words, flags)
    targets = {**model_targets(output), "statistics file": stats, "report": report}
    refuse_overwriting(targets, {"input model": model, "calibration data": data, "recipe": chosen})
    if report is not None:
        require_data(report, data)
        if is_torch_source(model):  # exported here, since the report runs the float model again
            model = opened(model, example_inputs, dynamic_batch=dynamic_batch, dynamic_shapes=dynamic_shapes)
            example_inputs, dynamic_batch, dynamic_shapes = None, False, None
    result = pipeline.quantize(
        model,
        output,
        recipe=chosen,
        data=data,
        samples=samples,
        exclude=exclude,
        changes=tree,
        stats=stats,
        device=device,
        effort=effort,
        executor=executor,
        checkpoint=checkpoint,
        resume=resume,
        device_exec=device_exec,
        max_memory=max_memory,
        on_forecast=on_forecast,
        example_inputs=example_inputs,
        dynamic_batch=dynamic_batch,
        dynamic_shapes=dynamic_shapes,
        listener=listener,
    )
    if report is not None:
        shown = model.model if isinstance(model, Exported) else model
        write_report(report, shown, result, data, device=device or DEVICE, listener=listener)
    return result


def forecast(
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
    effort: str | None = None,
    max_memory: str | int | None = None,
    exclude: Sequence[str] = (),
    include: Sequence[str] = (),
    exclude_subgraph: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
) -> Forecast:
    """What `roundel.quantize` with the same arguments would take; of the data, at most one sample is run.

    Raises:
        RoundelError: the model, the data or the recipe is wrong, or the memory too little.
    """
    words = image_words(mean, std, scale, resize, crop, layout, bgr)
    tree = recipe_changes(changes, include, exclude_subgraph, words)
    return expected_cost(
        model,
        recipe=chosen_recipe(preset, recipe) or DEFAULT_PRESET,
        data=data,
        samples=samples,
        changes=changed(tree, None, exclude),
        effort=effort,
        max_memory=max_memory,
    )


def auto(
    model: ModelSource,
    output: str | Path | None = None,
    *,
    data: object,
    samples: int | None = None,
    mean: Numbers | None = None,
    std: Numbers | None = None,
    scale: str | None = None,
    resize: Size | None = None,
    crop: Size | None = None,
    layout: str | None = None,
    bgr: bool = False,
    max_drop: str | float = "1%",
    eval_data: object = None,
    labels: object = None,
    metric: str | Metric | None = None,
    lower_is_better: bool = False,
    time: str | float | None = None,
    device: str | None = None,
    rungs: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    include: Sequence[str] = (),
    exclude_subgraph: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
    listener: Listener | None = None,
    on_step: Callable[[RungStep], None] | None = None,
) -> AutoResult:
    """Find the fastest number format that keeps the model within an accuracy budget, and write that model.

    Args:
        model: an ONNX file, a ModelProto, or an onnx-ir model. It is never changed.
        output: the file to write; its record `NAME.json` and the ladder `NAME.auto.json` appear beside it.
        data: calibration data, as `roundel.quantize` takes it, with the words from `samples` to `bgr`.
        max_drop: '1%' of the float model's metric, '1 point' of a hundred, or '0.01' in its own units.
        eval_data: data to judge by; without it, every fourth item of `data` is held out for that.
        labels: of what judges (all of `data` without `eval_data`), as `roundel.evaluate` takes them.
        metric: top1, top5, agreement, fidelity, cosine, 'module:function', 'file.py:function' or a function;
            without one: top1 with labels, else agreement with the float model for class scores, and fidelity
            for anything else.
        lower_is_better: for a metric of your own that measures an error.
        time: '10m', '90s' or seconds: no rung begins, or goes on, beyond it; the first is always finished.
        device: the NPU it is for; rungs whose format it does not take are left out.
        rungs: only these, by name, in the ladder's order.
        exclude: what stays float, as `roundel.quantize` takes it; `include` and `exclude_subgraph` likewise.
        changes: recipe values for every rung, nested as in the file.
        listener: told about progress.
        on_step: called with each rung when it is done.

    Returns:
        The ladder and the winner; `met` is False where no rung meets the budget, and the best is handed over.

    Raises:
        RoundelError: something in the model, the data or the options is wrong; nothing was written.
    """
    words = {**image_words(mean, std, scale, resize, crop, layout, bgr), "samples": samples}
    targets = model_targets(output)
    if output is not None:
        targets["output's ladder"] = ladder_path(Path(output))
    refuse_overwriting(targets, _judged(model, data, eval_data, labels, metric))
    return climb(
        model,
        output,
        data=data,
        eval_data=eval_data,
        labels=labels,
        metric=metric,
        lower_is_better=lower_is_better,
        max_drop=max_drop,
        time=time,
        device=device,
        rungs=rungs,
        exclude=exclude,
        changes=recipe_changes(changes, include, exclude_subgraph, words),
        listener=listener,
        on_step=on_step,
    )


def search(
    model: ModelSource,
    output: str | Path | None = None,
    *,
    data: object,
    samples: int | None = None,
    mean: Numbers | None = None,
    std: Numbers | None = None,
    scale: str | None = None,
    resize: Size | None = None,
    crop: Size | None = None,
    layout: str | None = None,
    bgr: bool = False,
    space: SpaceSource,
    trials: int = 20,
    study: str | Path | None = None,
    preset: str | None = None,
    recipe: RecipeSource | None = None,
    save_recipe: str | Path | None = None,
    eval_data: object = None,
    labels: object = None,
    metric: str | Metric | None = None,
    lower_is_better: bool = False,
    also: Sequence[str] = (),
    sampler: Sampler = "tpe",
    seed: int = 0,
    device: str | None = None,
    exclude: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
    executor: Executor | None = None,
    listener: Listener | None = None,
    on_trial: Callable[[Trial], None] | None = None,
) -> SearchResult:
    """Try combinations of recipe values, and keep what was found in a file that a later run goes on with.

    Args:
        model: an ONNX file, a ModelProto, or an onnx-ir model. It is never changed.
        output: a file for the best model, made again at the end; its record appears beside it.
        data: calibration data, as `roundel.quantize` takes it, with the words from `samples` to `bgr`.
        space: by dotted field, or 'preset': a list of values, or {'low', 'high', 'log'}; or words such as
            'weights.method=minmax,mse' and 'calibration.percentile=99..100'; or a YAML file of them.
        trials: how many in all, those of earlier runs in the same study among them.
        study: an SQLite file; a killed search goes on from it. None: the search ends with the process.
        preset: what the values are changes to; a8w8 when neither this nor a recipe is given.
        recipe: the same, as a file, a mapping or a Recipe.
        save_recipe: write the best recipe there.
        eval_data: data to judge by; without it, every fourth item of `data` is held out for that.
        labels: of what judges, as `roundel.evaluate` takes them.
        metric: as `roundel.auto` takes it, or sqnr, which is the default without labels.
        lower_is_better: for a metric of your own that measures an error.
        also: further objectives: size, time, npu.
        sampler: tpe learns from the trials before, random does not.
        seed: of the sampler.
        device: the NPU it is for.
        exclude: nodes that stay float.
        changes: recipe values for every trial, nested as in the file.
        executor: where each trial's calibration runs, from `roundel.executor(…)`; else in this process.
        listener: told about progress.
        on_trial: called with each trial when it has ended.

    Raises:
        DependencyError: Optuna is not installed.
        RoundelError: the space, the study, the model or the data do not fit.
    """
    chosen = chosen_recipe(preset, recipe) or DEFAULT_PRESET
    words = {**image_words(mean, std, scale, resize, crop, layout, bgr), "samples": samples}
    targets = {**model_targets(output), "best recipe": save_recipe, "study": study}
    sources = {**_judged(model, data, eval_data, labels, metric), "recipe": chosen, "space": space}
    refuse_overwriting(targets, sources)
    found = run_search(
        model,
        output,
        data=data,
        space=space,
        trials=trials,
        study=study,
        recipe=chosen,
        eval_data=eval_data,
        labels=labels,
        metric=metric,
        lower_is_better=lower_is_better,
        also=also,
        sampler=sampler,
        seed=seed,
        device=device,
        exclude=exclude,
        changes=recipe_changes(changes, data=words),
        executor=executor,
        listener=listener,
        on_trial=on_trial,
    )
    if save_recipe is not None and found.recipe is not None:
        write_text(Path(save_recipe), dump_yaml(found.recipe))
    return found


def _judged(
    model: ModelSource, data: object, eval_data: object, labels: object, metric: object
) -> dict[str, object]:
    """What a run that judges its own models reads."""
    given = {"input model": model, "calibration data": data, "evaluation data": eval_data, "labels": labels}
    return {**given, "metric": metric_file(metric)}
