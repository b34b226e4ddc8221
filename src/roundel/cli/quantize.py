"""`roundel quantize`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from roundel.cli import options
from roundel.cli.options import argument, option

if TYPE_CHECKING:
    from roundel.forecasting import Forecast

_DATA, _SHOW = "Data", "Output"


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
    stats: Annotated[
        Path | None, option("Statistics file: reused if it fits, else written.", panel=_DATA)
    ] = None,
    effort: Annotated[str | None, option("none, fast or high; the preset's own when not given.")] = None,
    device: Annotated[str | None, option("The NPU it is for: phx, stx or krk.")] = None,
    device_exec: Annotated[
        str | None, option("Where calibration and fine-tuning run: auto, cpu or cuda; cpu when not given.")
    ] = None,
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

    roundel quantize model.onnx -o out.onnx --data calib/ --report report.html

    roundel quantize model.onnx -o out.onnx --random 4        (a first look, no data at hand)

    roundel quantize model.onnx -o out.onnx --data calib/ --max-memory 2G

    roundel quantize mynet:make -o out.onnx --data calib/ --dynamic-batch     (PyTorch: make() in mynet.py)
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
        stats=stats,
        effort=effort,
        device=device,
        device_exec=device_exec,
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
