"""`roundel quantize`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from roundel.cli.options import (
    AnyModel,
    Exclude,
    ExcludeSubgraph,
    Include,
    Json,
    Preset,
    RecipeFile,
    Report,
    Set,
    WorkChoice,
    chosen_recipe,
    numbers,
    pixels,
    random_data,
    recipe_changes,
    takes_work,
)
from roundel.errors import RecipeError

if TYPE_CHECKING:
    from roundel.forecasting import Forecast

_EPILOG = """[bold]Examples[/]

roundel quantize model.onnx -o model.a8w8.onnx --data calib/ --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225

roundel quantize model.onnx -o out.onnx -p a16w8 --data inputs.npz --exclude 'op:Softmax' --exclude '/head/*'

roundel quantize model.onnx -o out.onnx -p xint8 --effort high --data calib/ --checkpoint tuning/ --resume

roundel quantize model.onnx -o out.onnx --data calib/ --report report.html

roundel quantize model.onnx -o out.onnx --random 4        (a first look, no data at hand)

roundel quantize model.onnx -o out.onnx --data calib/ --max-memory 2G

roundel quantize mynet:make -o out.onnx --data calib/ --dynamic-batch     (PyTorch: make() in mynet.py)
"""
_DATA, _IMAGES, _SHOW = "Data", "Images", "Output"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EPILOG, no_args_is_help=True)(takes_work(quantize))


def quantize(
    model: AnyModel,
    work: WorkChoice,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.", show_default=False)],
    preset: Preset = None,
    recipe: RecipeFile = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder of images, .npy or .npz files, or one .npy/.npz file.", rich_help_panel=_DATA
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Use at most this many.", rich_help_panel=_DATA)] = None,
    random: Annotated[
        int | None, typer.Option(help="Calibrate on this many random samples.", rich_help_panel=_DATA)
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="Shape of a random input, or of a module's example: NAME=1x3x48x320.", rich_help_panel=_DATA
        ),
    ] = None,
    stats: Annotated[
        Path | None,
        typer.Option(help="Statistics file: reused if it fits, else written.", rich_help_panel=_DATA),
    ] = None,
    mean: Annotated[
        str | None, typer.Option(help="Per channel, e.g. 0.5,0.5,0.5", rich_help_panel=_IMAGES)
    ] = None,
    std: Annotated[str | None, typer.Option(help="Per channel.", rich_help_panel=_IMAGES)] = None,
    scale: Annotated[
        str | None, typer.Option(help="unit (pixels / 255, the default) or raw.", rich_help_panel=_IMAGES)
    ] = None,
    resize: Annotated[
        str | None, typer.Option(help="Short side, or HEIGHTxWIDTH.", rich_help_panel=_IMAGES)
    ] = None,
    crop: Annotated[
        str | None, typer.Option(help="Centre crop: side, or HEIGHTxWIDTH.", rich_help_panel=_IMAGES)
    ] = None,
    layout: Annotated[str | None, typer.Option(help="nchw or nhwc.", rich_help_panel=_IMAGES)] = None,
    bgr: Annotated[bool, typer.Option("--bgr", help="Blue first.", rich_help_panel=_IMAGES)] = False,
    effort: Annotated[
        str | None,
        typer.Option(help="none, fast or high; the preset's own when not given.", show_default=False),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="The NPU it is for: phx, stx or krk.", show_default=False)
    ] = None,
    device_exec: Annotated[
        str | None,
        typer.Option(
            help="Where calibration and fine-tuning run: auto, cpu or cuda; cpu when not given.",
            show_default=False,
        ),
    ] = None,
    max_memory: Annotated[
        str | None,
        typer.Option(help="The most memory to take, e.g. 2G; the rest goes to files.", show_default=False),
    ] = None,
    dynamic_batch: Annotated[
        bool,
        typer.Option("--dynamic-batch", help="PyTorch: leave the first dimension of all inputs open."),
    ] = False,
    exclude: Exclude = None,
    include: Include = None,
    exclude_subgraph: ExcludeSubgraph = None,
    settings: Set = None,
    half_weights: Annotated[
        bool,
        typer.Option(
            "--half-weights", help="BF16, FP16: constants in 16 bits, same numbers.", rich_help_panel=_SHOW
        ),
    ] = False,
    strip_functions: Annotated[
        bool,
        typer.Option(
            "--strip-functions", help="Leave out the bodies of AMD's operators.", rich_help_panel=_SHOW
        ),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Show what became of every layer.", rich_help_panel=_SHOW),
    ] = False,
    report: Report = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print nothing.", rich_help_panel=_SHOW)
    ] = False,
    as_json: Json = False,
) -> None:
    """Quantize a float model and write a verified Q/DQ model with its record beside it."""
    image_options = {
        "mean": numbers(mean, "--mean"),
        "std": numbers(std, "--std"),
        "scale": scale,
        "resize": pixels(resize, "--resize"),
        "crop": pixels(crop, "--crop"),
        "layout": layout,
        "bgr": bgr,
    }
    flags = {"output.half_weights": half_weights, "output.strip_functions": strip_functions}
    words = [*(settings or ()), *(f"{key}=true" for key, given in flags.items() if given)]
    changes = recipe_changes(words, include, exclude_subgraph, image_options)
    if data is not None and random is not None:
        raise RecipeError(
            "Both --data and --random were given.",
            expected="one of them",
            hint="Use --data for a real result, --random for a first look.",
        )

    from roundel.cli.options import opened_model
    from roundel.pipeline import quantize as run
    from roundel.report.console import ProgressListener, show_summary, terminal

    source = random_data(random, shape) if random is not None else data
    opened = opened_model(model, shape, dynamic_batch=dynamic_batch)
    if report is not None:
        from roundel.reporting import check_report

        check_report(report, source, (model, output))
    silent = quiet or as_json
    told = None if silent else ProgressListener()

    def foretold(expected: Forecast) -> None:
        if told is not None and (expected.long or max_memory is not None):
            told.note(f"forecast: {expected}")

    result = run(
        opened,
        output,
        recipe=chosen_recipe(preset, recipe),
        data=source,
        samples=samples,
        exclude=exclude or (),
        changes=changes,
        stats=stats,
        device=device,
        effort=effort,
        device_exec=device_exec,
        max_memory=max_memory,
        on_forecast=None if silent else foretold,
        **work,
        listener=told,
    )
    if as_json:
        sys.stdout.write(result.record.to_json())
    elif not quiet:
        show_summary(terminal(), result.record, every_layer=verbose)
    if report is not None:
        from roundel.reporting import DEVICE, write_report

        shown = model if isinstance(opened, Path) else opened.model
        write_report(
            report,
            shown,
            result,
            source,
            device=device or DEVICE,
            listener=None if silent else ProgressListener(),
        )
        if not silent:
            terminal().print(f"report: {report}", markup=False, highlight=False, soft_wrap=True)
