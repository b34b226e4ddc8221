"""The `roundel` command and its sub-commands. Heavy imports stay inside the commands."""

from __future__ import annotations

import logging
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from roundel.cli import (
    auto,
    check,
    compare,
    convert,
    demo,
    deploy,
    evaluate,
    explain,
    infer,
    inspect,
    lint_data,
    npu_report,
    presets,
    quantize,
    reproduce,
    search,
    sensitivity,
    tools,
)
from roundel.errors import RoundelError
from roundel.version import VERSION


class _Group(TyperGroup):
    """Commands that an interrupt ends in the shell's way, whatever typer's version makes of it."""

    def invoke(self, ctx: Any) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.stderr.write("interrupted: no partial file was left\n")
            raise typer.Exit(130) from None


app = typer.Typer(
    name="roundel",
    cls=_Group,
    help="Quantize neural networks for AMD Ryzen AI NPUs.",
    epilog="First look: roundel demo. Own model: roundel quantize MODEL -o OUT --data DIR.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

for _command in (
    quantize,
    auto,
    search,
    convert,
    check,
    explain,
    inspect,
    infer,
    evaluate,
    compare,
    sensitivity,
    lint_data,
    deploy,
    npu_report,
    tools,
    reproduce,
    presets,
    demo,
):
    _command.register(app)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"roundel {VERSION}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version and leave."
    ),
) -> None:
    pass


def main() -> None:
    """Run the command line; user errors become a short message and an exit code."""
    # What onnx-ir logs about a broken model, the error that follows says better.
    logging.getLogger("onnx_ir").setLevel(logging.CRITICAL)
    try:
        app()
    except RoundelError as error:
        _report(error)
        sys.exit(error.exit_code)


def _report(error: RoundelError) -> None:
    if "--json" in sys.argv:
        import json

        details = dict(error.details())
        sys.stdout.write(json.dumps({"error": type(error).__name__, "what": error.what, **details}) + "\n")
        return
    from roundel.report.console import show_error, terminal

    show_error(terminal(stderr=True), error)
