"""`roundel infer`, `evaluate`, `compare`, `sensitivity` and `lint-data`: models at work on data."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundel.cli import options
from roundel.cli.options import argument, option

if TYPE_CHECKING:
    from rich.console import Console

_FOLDERS, _MODELS = "Two folders of results", "Models on data"


@options.takes(data=options.needed_data)
def infer_command(
    model: options.EitherModel,
    out: Annotated[Path, option("Folder to write to; created if missing.", "--out", "-o")],
    data: options.Words,
    output: Annotated[list[str] | None, option("Save only this output of the model.")] = None,
    images: Annotated[
        bool, option("Save PNG pictures (values 0..1) instead of .npy arrays.", "--images")
    ] = False,
    as_npu: options.AsNpu = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Run a model over data and save each output, named after its input.

    Examples:

    roundel infer model.onnx --data images/ --out baseline_results/

    roundel infer model.a8w8.onnx --data images/ --out quantized_results/

    roundel infer model.xint8.onnx --data images/ --out npu_results/ --as-npu phx

    roundel evaluate --baseline baseline_results/ --quantized quantized_results/
    """
    from roundel.measure.runner import infer
    from roundel.plain import to_plain
    from roundel.report.console import show_notes, terminal

    listener = options.live_line(silent=quiet or as_json)
    done = infer(
        model, **data, out=out, outputs=output or (), images=images, as_npu=as_npu, listener=listener
    )
    if as_json:
        options.put_json(to_plain(done))
    elif not quiet:
        terminal().print(
            f"{len(done.files)} files in {done.folder} ({', '.join(done.outputs)}), {done.seconds:.1f} s",
            highlight=False,
            markup=False,
        )
        show_notes(terminal(), done.notes)


@options.takes(data=options.data_words, work=options.work_words, kept=options.kept_words)
def evaluate_command(
    models: Annotated[
        list[Path] | None, argument("Models, the float one first. Or two folders of results.", "MODEL")
    ] = None,
    baseline: Annotated[
        Path | None,
        option(
            "Results of the float model: .jpg, .png or .npy.",
            "--baseline",
            "--baseline_results_folder",
            "--baseline-results-folder",
            panel=_FOLDERS,
        ),
    ] = None,
    quantized: Annotated[
        Path | None,
        option(
            "Results of the quantized model, under the same names.",
            "--quantized",
            "--quantized_results_folder",
            "--quantized-results-folder",
            panel=_FOLDERS,
        ),
    ] = None,
    labels: Annotated[
        str | None,
        option(
            "File of class numbers (.npy, .npz, .json, .csv, .txt), 'folders', or 're:REGEX'. Boxes: .json.",
            panel=_MODELS,
        ),
    ] = None,
    metric: Annotated[
        str | None,
        option(
            "Your own: module:function or file.py:function, called with (outputs, labels).", panel=_MODELS
        ),
    ] = None,
    task: Annotated[str, option("classification or detection.", panel=_MODELS)] = "classification",
    decoder: Annotated[
        str | None,
        option("Of detection: ssd, yolov5, yolox or yolov8; else by the outputs' shapes.", panel=_MODELS),
    ] = None,
    nms_iou: Annotated[
        float, option("Of detection: boxes of a class that overlap by more are one.", panel=_MODELS)
    ] = 0.6,
    as_npu: options.AsNpu = None,
    csv: Annotated[Path | None, option("Also write the scores of each file (or model) there.")] = None,
    as_json: options.Json = False,
    *,
    data: options.Words,
    work: options.Words,
    kept: options.Words,
) -> None:
    """Judge results: two folders file by file, or models side by side on data.

    Examples:

    roundel evaluate --baseline baseline_results/ --quantized quantized_results/ --csv scores.csv

    roundel evaluate model.onnx model.a8w8.onnx --data val/ --labels folders   (preprocessed as in the record)

    roundel evaluate model.onnx model.xint8.onnx --data x.npz --labels x.npz --metric mine.py:f1

    roundel evaluate yolo.onnx yolo.xint8.onnx --task detection --data val/ --labels boxes.json --letterbox
    """
    from roundel.measure.evaluate import evaluate
    from roundel.report.views import show_folders, show_models

    scores = evaluate(
        models or (),
        **data,
        baseline=baseline,
        quantized=quantized,
        labels=labels,
        metric=metric,
        task=task,
        decoder=decoder,
        nms_iou=nms_iou,
        as_npu=as_npu,
        csv=csv,
        **work,
        **kept,
        listener=options.live_line(silent=as_json),
    )
    if isinstance(scores, tuple):
        tree = {"models": [score.to_dict() for score in scores]}
        options.put(as_json, tree, lambda to, told: show_models(to, told["models"]))
    else:
        options.put(as_json, scores.to_dict(), show_folders)


@options.takes(data=options.data_words, work=options.work_words, kept=options.kept_words)
def compare_command(
    float_model: options.Model,
    quantized_model: Annotated[Path, argument("Its quantized form, from any tool.")],
    data: options.Words,
    work: options.Words,
    kept: options.Words,
    everything: Annotated[
        bool, option("All tensors, in order of execution, not only the worst.", "--all")
    ] = False,
    weights: Annotated[bool, option("Also list the weights.", "--weights")] = False,
    eval_data: options.EvalData = None,
    labels: options.EvalLabels = None,
    task: options.EvalTask = "classification",
    csv: Annotated[Path | None, option("Also write all tensors there.")] = None,
    report: options.Report = None,
    device: Annotated[str | None, option("The NPU whose split is predicted; the run's, else stx.")] = None,
    as_npu: options.AsNpu = None,
    as_json: options.Json = False,
) -> None:
    """Compare a float model and its quantized form tensor by tensor: which layer hurts, and why.

    Examples:

    roundel compare model.onnx model.a8w8.onnx         (data and preprocessing as in the record beside it)

    roundel compare model.onnx model.a8w8.onnx --data images/ --samples 32

    roundel compare model.onnx other-tools.onnx --data inputs.npz --all --csv layers.csv

    roundel compare model.onnx model.a8w8.onnx --data images/ --report report.html
    """
    from roundel.report.views import show_comparison
    from roundel.reporting import compare

    result = compare(
        float_model,
        quantized_model,
        **data,
        eval_data=eval_data,
        labels=labels,
        task=task,
        csv=csv,
        report=report,
        device=device,
        as_npu=as_npu,
        **work,
        **kept,
        listener=options.live_line(silent=as_json),
    )

    def show(console: Console, tree: Any) -> None:
        show_comparison(console, tree, everything=everything, weights=weights)
        options.put_report(report)

    options.put(as_json, result.to_dict(), show)


@options.takes(
    chosen=options.recipe_words, data=options.data_words, work=options.work_words, kept=options.kept_words
)
def sensitivity_command(
    model: Annotated[Path, argument("The float model, or a quantized one with its record beside it.")],
    chosen: options.Words,
    data: options.Words,
    work: options.Words,
    kept: options.Words,
    look: Annotated[int, option("Samples that each layer is measured with.")] = 8,
    worst: Annotated[int, option("Layers that get proposals, at most.")] = 5,
    everything: Annotated[bool, option("List all layers, not only the worst.", "--all")] = False,
    as_json: options.Json = False,
) -> None:
    """Rank the layers by what quantizing them costs at the output, and say what would help.

    Examples:

    roundel sensitivity model.a8w8.onnx         (the float model, recipe and data are in its record)

    roundel sensitivity model.onnx --data images/

    roundel sensitivity model.onnx -p xint8 --data inputs.npz --worst 3 --json
    """
    from roundel.measure.sensitivity import sensitivity
    from roundel.report.views import show_sensitivity

    found = sensitivity(
        model,
        **chosen,
        **data,
        look=look,
        worst=worst,
        **work,
        **kept,
        listener=options.live_line(silent=as_json),
    )
    show = functools.partial(show_sensitivity, everything=everything)
    options.put(as_json, found.to_dict(), show)


@options.takes(data=options.needed_data)
def lint_data_command(
    model: options.Model,
    data: options.Words,
    against: Annotated[
        Path | None, option("Other data, preprocessed alike, that should look the same (evaluation data).")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Look for what would spoil a calibration: odd samples, wrong scaling or colours, too few samples.

    Examples:

    roundel lint-data model.onnx --data calib/ --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225

    roundel lint-data model.onnx --data calib/ --against val/

    Exit code: 0 when there is no warning, 1 when there is one.
    """
    from roundel.measure.lint import lint_data
    from roundel.report.views import show_findings

    report = lint_data(model, **data, against=against, listener=options.live_line(silent=as_json))
    options.put(as_json, report.to_dict(), show_findings)
    if not report.clean:
        raise typer.Exit(1)
