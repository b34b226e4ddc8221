"""`roundel check`, `deploy` and `npu-report`: before, at and after the way to an NPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from roundel.cli import options
from roundel.cli.options import argument, option

Device = Annotated[str, option("phx, hpt, stx, stx-halo or krk.", "--device", "-d")]


def check_command(
    model: options.EitherModel,
    preset: Annotated[
        str | None,
        option("xint8, a8w8, a16w8 or bf16; else a8w8, or what a quantized model shows.", "--preset", "-p"),
    ] = None,
    device: Device = "stx",
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

    report = check(model, preset=preset, device=device)
    tree = report.to_dict(nodes=nodes)
    options.put(as_json, tree, lambda to: show_check(to, tree))
    if not report.passed:
        raise typer.Exit(1)


def deploy_command(
    model: Annotated[Path, argument("The model to deploy: quantized or float.")],
    output: Annotated[Path, option("The folder to write; may be new.", "--output", "-o")],
    device: Device = "stx",
    optimize_level: Annotated[int, option("Effort of the BF16 compiler, 1 to 3.")] = 2,
    as_json: options.Json = False,
) -> None:
    """Write a folder to run a model on a Ryzen AI NPU: model, provider options, run script, instructions.

    Examples:

    roundel deploy model.a8w8.onnx --device stx -o kit/

    python kit/run.py --random --report
    """
    from roundel.kit.console import show_kit
    from roundel.kit.kit import deploy

    kit = deploy(model, output, device=device, optimize_level=optimize_level)
    options.put(as_json, kit.to_dict(), lambda to: show_kit(to, kit))


def npu_report_command(
    file: Annotated[Path, argument("vitisai_ep_report.json, or a log of the session.")],
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
    """Show which operators ran on the NPU and which on the CPU, from the provider's report or console log.

    Examples:

    roundel npu-report kit/cache/*/vitisai_ep_report.json

    roundel npu-report session.log --model kit/model.onnx --device krk   (beside what `roundel check`
    predicts)

    roundel npu-report session.log --json
    """
    from roundel.kit.console import show_report
    from roundel.kit.npu_report import npu_report

    report = npu_report(file, model=model, preset=preset, device=device)
    options.put(as_json, report.to_dict(), lambda to: show_report(to, report))
