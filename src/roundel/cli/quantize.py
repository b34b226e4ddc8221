"""`roundel quantize`, and `auto` and `search`, which try many recipes and keep the best."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundel.cli import options
from roundel.cli.options import argument, option

if TYPE_CHECKING:
    from roundel.forecasting import Forecast

NOT_MET = 9  # exit code: the result misses the goal or the budget; it was written all the same
_DATA, _SHOW, _BUDGET, _JUDGE = "Data", "Output", "Budget", "Judging"


@options.takes(
    chosen=options.recipe_words, data=options.data_words, work=options.work_words, kept=options.kept_words
)
def quantize_command(
    model: Annotated[
        Path, argument("The float model: an ONNX file; of PyTorch a .pt2 file, or package.module:factory.")
    ],
    output: options.Output,
    chosen: options.Words,
    data: options.Words,
    random: Annotated[int | None, option("Calibrate on this many random samples.", panel=_DATA)] = None,
    shape: Annotated[
        list[str] | None,
        option("Shape of a random input, or of a module's example: NAME=1x3x48x320.", panel=_DATA),
    ] = None,
    eval_data: options.EvalData = None,
    labels: options.EvalLabels = None,
    task: options.EvalTask = "classification",
    stats: Annotated[
        Path | None, option("Statistics file: reused if it fits, else written.", panel=_DATA)
    ] = None,
    effort: Annotated[str | None, option("none, fast or high; the preset's own when not given.")] = None,
    goal: Annotated[
        str | None, option("What each output should reach, e.g. 20dB (15 when not given); else exit code 9.")
    ] = None,
    device: Annotated[str | None, option("The NPU it is for: phx, stx or krk.")] = None,
    device_exec: Annotated[
        str | None, option("Where calibration and fine-tuning run: auto, cpu or cuda; cpu when not given.")
    ] = None,
    cut_head: Annotated[
        bool, option("End at the last layers; the rest becomes NAME.tail.onnx, in float.", "--cut-head")
    ] = False,
    max_memory: Annotated[
        str | None, option("The most memory to take, e.g. 2G; the rest goes to files.")
    ] = None,
    dynamic_batch: Annotated[
        bool, option("PyTorch: leave the first dimension of all inputs open.", "--dynamic-batch")
    ] = False,
    exclude_subgraph: options.ExcludeSubgraph = None,
    half_weights: Annotated[
        bool, option("BF16, FP16: constants in 16 bits, same numbers.", "--half-weights", panel=_SHOW)
    ] = False,
    strip_functions: Annotated[
        bool, option("Leave out the bodies of AMD's operators.", "--strip-functions", panel=_SHOW)
    ] = False,
    verbose: Annotated[
        bool, option("Show what became of every layer.", "--verbose", "-v", panel=_SHOW)
    ] = False,
    report: options.Report = None,
    quiet: Annotated[bool, option("Print nothing.", "--quiet", "-q", panel=_SHOW)] = False,
    as_json: options.Json = False,
    *,
    work: options.Words,
    kept: options.Words,
) -> None:
    """Quantize a float model and write a verified Q/DQ model with its record beside it.

    Examples:

    roundel quantize model.onnx -o model.a8w8.onnx --data calib/ --mean 0.485,0.456,0.406 --std
    0.229,0.224,0.225

    roundel quantize model.onnx -o out.onnx -p a16w8 --data inputs.npz --exclude 'op:Softmax' --exclude
    '/head/*'

    roundel quantize model.onnx -o out.onnx -p xint8 --effort high --data calib/ --checkpoint tuning/ --resume

    roundel quantize model.onnx -o out.onnx --data calib/ --eval-data val/ --labels folders

    roundel quantize model.onnx -o out.onnx --data calib/ --report report.html

    roundel quantize model.onnx -o out.onnx --random 4        (a first look, no data at hand)

    roundel quantize model.onnx -o out.onnx --data calib/ --max-memory 2G

    roundel quantize model.onnx -o out.onnx --data calib/ --goal 20dB

    roundel quantize mynet:make -o out.onnx --data calib/ --dynamic-batch     (PyTorch: make() in mynet.py)

    Exit code 9: --goal was given and an output misses it; the file was written all the same.
    """
    from roundel.pipeline import quantize
    from roundel.report.console import show_summary, terminal

    told = options.live_line(silent=quiet or as_json)

    def foretold(expected: Forecast) -> None:
        if told is not None and (expected.long or max_memory is not None):
            told.note(f"forecast: {expected}")

    result = quantize(
        model,
        output,
        **chosen,
        **data,
        eval_data=eval_data,
        labels=labels,
        task=task,
        stats=stats,
        effort=effort,
        goal=goal,
        device=device,
        device_exec=device_exec,
        cut_head=cut_head,
        max_memory=max_memory,
        exclude_subgraph=exclude_subgraph or (),
        half_weights=half_weights,
        strip_functions=strip_functions,
        report=report,
        example_inputs=_example(model, shape),
        dynamic_batch=dynamic_batch,
        **work,
        **kept,
        listener=told,
        on_forecast=None if told is None else foretold,
    )
    if as_json:
        sys.stdout.write(result.record.to_json())
    elif not quiet:
        show_summary(terminal(), result.record, every_layer=verbose)
        options.put_report(report)
    if goal is not None and not result.record.reached:
        raise typer.Exit(NOT_MET)


def _example(model: Path, shapes: list[str] | None) -> object:
    """Inputs by parameter name, in the shapes given, for a factory that brings none; the export sees them."""
    from roundel.torch import is_torch_source

    if not shapes or not is_torch_source(model):
        return None
    from roundel.torch.opening import require_exporter

    require_exporter()
    import torch

    generator: Any = torch.Generator().manual_seed(0)
    sizes = options.random_data(1, shapes).shapes
    return {name: torch.randn(size, generator=generator) for name, size in sizes.items()}


Device = Annotated[str | None, option("The NPU it is for: phx, hpt, stx, krk …")]


def judge_words(
    eval_data: Annotated[
        Path | None, option("Data to judge by; without it a quarter of --data is held out.", panel=_JUDGE)
    ] = None,
    labels: Annotated[
        str | None,
        option(
            "Of what judges: class numbers, 'folders', 're:REGEX' or boxes; see `evaluate`.", panel=_JUDGE
        ),
    ] = None,
    metric: Annotated[
        str | None,
        option(
            "top1, top5, agreement, fidelity, cosine, map, boxf1 (search: sqnr); or file.py:function.",
            panel=_JUDGE,
        ),
    ] = None,
    lower_is_better: Annotated[
        bool, option("Your own metric is an error.", "--lower-is-better", panel=_JUDGE)
    ] = False,
    decoder: Annotated[
        str | None,
        option("Of boxes: ssd, yolov5, yolox or yolov8; else by the outputs' shapes.", panel=_JUDGE),
    ] = None,
) -> options.Words:
    """What the models on trial are judged by."""
    judging = {"eval_data": eval_data, "labels": labels, "metric": metric, "decoder": decoder}
    return {**judging, "lower_is_better": lower_is_better}


@options.takes(judging=judge_words, data=options.needed_data)
def auto_command(
    model: options.Model,
    output: options.Output,
    max_drop: Annotated[
        str,
        option(
            "'1%' of the float model's metric, '1 point' of a hundred, '1map', or '0.01' in its own units.",
            panel=_BUDGET,
        ),
    ] = "1%",
    time: Annotated[
        str | None, option("Most time for the whole walk: 10m, 90s, 1h30m.", panel=_BUDGET)
    ] = None,
    device: Device = None,
    rungs: Annotated[
        str | None,
        option("Only these, e.g. xint8,a8w8,a16w8,mixed,bf16; also xint8-adaround, xint8-adaquant."),
    ] = None,
    exclude: options.Exclude = None,
    include: options.Include = None,
    exclude_subgraph: options.ExcludeSubgraph = None,
    fix_inputs: options.FixInputs = None,
    settings: options.Set = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
    *,
    judging: options.Words,
    data: options.Words,
) -> None:
    """Find the fastest number format that keeps the model within an accuracy budget, and write that model.

    Examples:

    roundel auto model.onnx -o out.onnx --data calib/ --eval-data val/ --labels folders --max-drop '1 point'

    roundel auto model.onnx -o out.onnx --data calib.npz --max-drop 1% --time 10m --device stx

    roundel auto model.onnx -o out.onnx --data calib/ --metric mine.py:map50 --max-drop 0.005

    Exit code 9: no rung meets the budget, and the best one was written all the same.
    """
    from roundel.measure.yardstick import measure_of
    from roundel.report.console import terminal
    from roundel.report.views import show_ladder, step_line
    from roundel.trials.auto import auto
    from roundel.trials.budget import parse_drop
    from roundel.trials.rungs import RungStep

    silent = quiet or as_json
    drop, own = parse_drop(max_drop), measure_of(judging["metric"], lower=judging["lower_is_better"])
    words = own.text if own is not None else "{:.2%}".format

    def heard(step: RungStep) -> None:
        text = step_line(step.to_dict(), words, drop.words)
        terminal(stderr=True).print(text, markup=False, highlight=False)

    found = auto(
        model,
        output,
        **data,
        max_drop=max_drop,
        **judging,
        time=time,
        device=device,
        rungs=None if rungs is None else options.names(rungs),
        exclude=exclude or (),
        include=include or (),
        exclude_subgraph=exclude_subgraph or (),
        fix_inputs=options.fixed_inputs(fix_inputs),
        changes=options.settings_tree(settings),
        listener=options.live_line(silent=silent),
        on_step=None if silent else heard,
    )
    if as_json:
        sys.stdout.write(found.to_json())
    elif not quiet:
        show_ladder(terminal(), found.to_dict(), words, drop.words)
    if not found.met:
        raise typer.Exit(NOT_MET)


@options.takes(judging=judge_words, data=options.needed_data, work=options.work_words)
def search_command(
    model: options.Model,
    space: Annotated[
        list[str],
        option("FIELD=a,b,c or FIELD=low..high[:log] of a recipe, preset=a,b, or a YAML file of them."),
    ],
    trials: Annotated[int, option("How many in all, those of earlier runs among them.")] = 20,
    study: Annotated[Path | None, option("SQLite file of the study: a later run goes on with it.")] = None,
    output: Annotated[Path | None, option("Write the best model there.", "--output", "-o")] = None,
    preset: options.Preset = None,
    recipe: options.RecipeFile = None,
    save_recipe: Annotated[Path | None, option("Write the best recipe there.")] = None,
    also: Annotated[str | None, option("Further objectives: size, time, npu.", panel=_JUDGE)] = None,
    sampler: Annotated[str, option("tpe or random.")] = "tpe",
    seed: Annotated[int, option("Of the sampler.")] = 0,
    device: Device = None,
    exclude: options.Exclude = None,
    fix_inputs: options.FixInputs = None,
    settings: options.Set = None,
    as_json: options.Json = False,
    *,
    judging: options.Words,
    data: options.Words,
    work: options.Words,
) -> None:
    """Search recipe values for the best model, in a study that a later run goes on with (needs Optuna).

    Examples:

    roundel search model.onnx --data calib/ --space weights.method=minmax,mse --space
    calibration.margin=1.0..2.0

    roundel search model.onnx --data calib/ --space preset=xint8,a8w8,a16w8 --also size --study my.db -o
    best.onnx

    roundel search model.onnx --data calib/ --space space.yaml --trials 50 --study my.db   (killed? run it
    again)
    """
    from roundel.report.console import terminal
    from roundel.report.views import show_study
    from roundel.trials.search import search
    from roundel.trials.study import Trial

    kind: Any = sampler  # `search` says what there is

    def heard(trial: Trial) -> None:
        values = ", ".join(f"{value:.5g}" for value in trial.values) or f"refused, {trial.reason}"
        terminal(stderr=True).print(f"trial {trial.number}: {values}", markup=False, highlight=False)

    found = search(
        model,
        output,
        **data,
        space=space,
        trials=trials,
        study=study,
        preset=preset,
        recipe=recipe,
        save_recipe=save_recipe,
        **judging,
        also=options.names(also),
        sampler=kind,
        seed=seed,
        device=device,
        exclude=exclude or (),
        fix_inputs=options.fixed_inputs(fix_inputs),
        changes=options.settings_tree(settings),
        **work,
        listener=options.live_line(silent=as_json),
        on_trial=None if as_json else heard,
    )
    options.put(as_json, found.to_dict(), show_study)
