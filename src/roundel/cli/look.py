"""The commands that look at models, presets, runs and what an NPU makes of them, convert and deploy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundel.cli import options
from roundel.cli.options import argument, option

if TYPE_CHECKING:
    from rich.console import Console


@options.takes(chosen=options.recipe_words)
def explain_command(
    model: options.Model,
    chosen: options.Words,
    tensor: Annotated[str | None, option("Only this tensor.")] = None,
    as_json: options.Json = False,
) -> None:
    """Show what every tensor would become, and why. Needs no data.

    Examples:

    roundel explain model.onnx --preset a16w8

    roundel explain model.onnx --tensor /layer1/conv/Conv_output_0
    """
    from roundel.inspection import explain
    from roundel.report.console import show_plan, terminal
    from roundel.report.record import plan_json

    plan = explain(model, **chosen, tensor=tensor)
    if as_json:
        sys.stdout.write(plan_json(plan, tensor))
    else:
        show_plan(terminal(), plan, tensor)


def inspect_command(
    model: options.Model,
    preset: options.Preset = None,
    fix_inputs: options.FixInputs = None,
    nodes: Annotated[bool, option("List every node.", "--nodes")] = False,
    as_json: options.Json = False,
) -> None:
    """Show a model's inputs, operators, types and sizes, and what a preset would quantize.

    Example:

    roundel inspect model.onnx --nodes
    """
    from roundel.inspection import inspect
    from roundel.report.console import show_inspection

    found = inspect(model, preset=preset, fix_inputs=options.fixed_inputs(fix_inputs))
    options.put(as_json, found.to_dict(nodes=nodes), lambda to, _: show_inspection(to, found, nodes=nodes))


def presets_command(
    name: Annotated[str | None, argument("Print this preset as a recipe file.")] = None,
    as_json: options.Json = False,
) -> None:
    """List the presets, or print one as a recipe file.

    Example:

    roundel presets a8w8 > my.yaml   (then edit it; pass --recipe my.yaml)
    """
    from roundel.options import presets
    from roundel.recipe.load import dump_yaml
    from roundel.report.console import show_presets

    recipes = presets(name)
    if name is None:
        titles = {known: recipe.title for known, recipe in recipes.items()}
        options.put(as_json, titles, lambda to, _: show_presets(to, recipes))
        return
    (recipe,) = recipes.values()
    options.put(as_json, recipe.model_dump(mode="json"), lambda *_: sys.stdout.write(dump_yaml(recipe)))


Device = Annotated[str, option("phx, hpt, stx, stx-halo or krk.", "--device", "-d")]


def check_command(
    model: options.EitherModel,
    preset: Annotated[
        str | None,
        option("xint8, a8w8, a16w8 or bf16; else a8w8, or what a quantized model shows.", "--preset", "-p"),
    ] = None,
    device: Device = "stx",
    fix_inputs: options.FixInputs = None,
    nodes: Annotated[bool, option("List the place of every node, and why.", "--nodes")] = False,
    as_json: options.Json = False,
) -> None:
    """Say what will run on the NPU and what stands in the way. Needs no NPU and no data.

    Examples:

    roundel check model.onnx --preset xint8 --device stx

    roundel check model.int8.onnx --nodes   (a model that any tool has quantized)

    Exit code: 0 when no finding is an error, 1 when one is.
    """
    from roundel.report.views import show_check
    from roundel.rules import check

    report = check(model, preset=preset, device=device, fix_inputs=options.fixed_inputs(fix_inputs))
    options.put(as_json, report.to_dict(nodes=nodes), show_check)
    if not report.passed:
        raise typer.Exit(1)


@options.takes(images=options.image_words)
def deploy_command(
    model: Annotated[Path, argument("The model to deploy: quantized or float.")],
    output: Annotated[Path, option("The folder to write; may be new.", "--output", "-o")],
    device: Annotated[
        str | None, option("phx, hpt, stx, stx-halo or krk; the run's, else stx.", "--device", "-d")
    ] = None,
    optimize_level: Annotated[int, option("Effort of the BF16 compiler, 1 to 3.")] = 2,
    as_json: options.Json = False,
    *,
    images: options.Words,
) -> None:
    """Write a folder to run a model on a Ryzen AI NPU: model, provider options, run script, instructions.

    Examples:

    roundel deploy model.a8w8.onnx -o kit/      (device and preprocessing as in the record beside the model)

    roundel deploy model.a8w8.onnx --device stx -o kit/ --mean 0.5 --std 0.5

    python kit/run.py --image cat.jpg --report
    """
    from roundel.kit.kit import deploy, show_kit

    kit = deploy(model, output, device=device, optimize_level=optimize_level, **images)
    options.put(as_json, kit.to_dict(), lambda to, _: show_kit(to, kit))


def npu_report_command(
    file: Annotated[Path, argument("vitisai_ep_report.json, a log of the session, or the cache folder.")],
    model: Annotated[
        Path | None,
        option("The model that ran: shows where each operator type went, and what was predicted."),
    ] = None,
    preset: Annotated[
        str | None, option("Its format; else what it shows, or bf16.", "--preset", "-p")
    ] = None,
    device: Annotated[str | None, option("Where it ran; else stx.", "--device", "-d")] = None,
    as_json: options.Json = False,
) -> None:
    """Show what ran on the NPU and what on the CPU, and why, from what provider and compiler have written.

    Examples:

    roundel npu-report kit/cache/*/vitisai_ep_report.json

    roundel npu-report session.log --model kit/model.onnx --device krk   (beside what `roundel check`
    predicts)

    roundel npu-report kit/cache/ --model kit/model.onnx   (the BF16 compiler's reasons, explained)

    roundel npu-report session.log --json
    """
    from roundel.kit.npu_report import npu_report, show_report

    report = npu_report(file, model=model, preset=preset, device=device)
    options.put(as_json, report.to_dict(), lambda to, _: show_report(to, report))


def convert_command(
    model: Annotated[Path, argument("A float ONNX model, or one in bfloat16 or float16.")],
    output: options.Output,
    to: Annotated[str, option("bf16, fp16 or fp32.")] = "bf16",
    form: Annotated[
        str, option("pair (AMD's operators), cast, or plain (only constants are rounded).")
    ] = "pair",
    half_weights: Annotated[
        bool, option("Constants in 16 bits: half the size, the same numbers.", "--half-weights")
    ] = False,
    strip_functions: Annotated[
        bool, option("Leave out the bodies of AMD's operators.", "--strip-functions")
    ] = False,
    external_data: Annotated[bool, option("Weights in a file of their own.", "--external-data")] = False,
    data: Annotated[Path | None, option("Samples to compare on: a folder, .npy or .npz.")] = None,
    samples: Annotated[int | None, option("Use at most this many.")] = None,
    as_json: options.Json = False,
) -> None:
    """Convert a whole model to bfloat16 or float16 and back, without calibration.

    Examples:

    roundel convert model.onnx -o model.bf16.onnx --data inputs.npz   (and how far its outputs move)

    roundel convert model.onnx -o small.onnx --form cast --half-weights

    roundel convert model.bf16.onnx -o bare.onnx --strip-functions    (for AMD's tools)

    roundel convert model.bf16.onnx -o model.float.onnx --to fp32
    """
    from roundel.conversion import convert
    from roundel.report.console import show_conversion

    result = convert(
        model,
        output,
        to=to,  # type: ignore[arg-type]
        form=form,  # type: ignore[arg-type]
        half_weights=half_weights,
        strip_functions=strip_functions,
        external_data=external_data,
        data=data,
        samples=samples,
    )
    options.put(as_json, result.to_dict(), show_conversion)


def reproduce_command(
    record: Annotated[Path, argument("The JSON file beside a quantized model.")],
    model: Annotated[Path | None, option("The float model, where it has moved.")] = None,
    data: Annotated[Path | None, option("The calibration data, where they have moved.")] = None,
    output: Annotated[Path | None, option("Keep the new model here.", "--output", "-o")] = None,
    as_json: options.Json = False,
) -> None:
    """Repeat a run from its record and say whether the result has the same bytes; exit code 1 if not.

    Examples:

    roundel reproduce model.a8w8.json

    roundel reproduce model.a8w8.json --model other/place/model.onnx --data other/place/calib -o again.onnx
    """
    from roundel.reproduction import reproduce

    told = options.live_line(silent=as_json)
    found = reproduce(record, model=model, data=data, output=output, listener=told)

    def show(console: Console, _: object) -> None:
        verdict = "the same, byte for byte" if found.matches else "not the same"
        console.print(f"quantized model: {verdict}", highlight=False)
        for difference in found.differences:
            console.print(f"  {difference}", markup=False, highlight=False, soft_wrap=True)

    options.put(as_json, found.to_dict(), show)
    if not found.matches:
        raise typer.Exit(1)


def demo_command(
    preset: Annotated[list[str] | None, option("Only these presets.", "--preset", "-p")] = None,
    output: Annotated[Path | None, option("Keep the models in this folder.", "--output", "-o")] = None,
    as_json: options.Json = False,
) -> None:
    """Quantize the embedded example with every preset and compare the results.

    Examples:

    roundel demo

    roundel demo -p a8w8 -p a16w8 -o models/
    """
    from roundel.plain import to_plain
    from roundel.report.console import show_demo
    from roundel.showcase import demo

    rows = demo(preset, output, listener=options.live_line(silent=as_json))
    options.put(as_json, to_plain(rows), lambda to, _: show_demo(to, rows))


# The tools read their own arguments, --help included, under the names that the documents give them.
TOOLS_SETTINGS: dict[str, Any] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": ["--about"],
}


def tools_command(context: typer.Context) -> None:
    """Converters and utilities for finished models: `roundel tools NAME --help`.

    Examples:

    roundel tools                                                     (lists them)

    roundel tools convert_s8s8_to_u8s8 model.onnx model.u8.onnx

    roundel tools remove_qdq_between_ops --input_model a.onnx --between_ops 'Mul,Add' --output_model b.onnx
    """
    from roundel.quark.tools import TOOLS, run_tool

    name, *arguments = context.args or [""]
    if name in ("", "--help", "-h"):
        width = max(map(len, TOOLS)) + 2
        rows = (f"{tool.name:<{width}}{tool.summary}" for tool in TOOLS.values())
        sys.stdout.write("\n".join(["roundel tools NAME [ARGUMENT …]", "", *rows]) + "\n")
        return
    run_tool(name, arguments)
