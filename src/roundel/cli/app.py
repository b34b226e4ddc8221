"""The `roundel` command and its sub-commands. Heavy imports stay inside the commands."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from roundel.cli import look, measure, options, quantize
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
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

_COMMANDS: tuple[Callable[..., None], ...] = (
    *(quantize.quantize_command, quantize.auto_command, quantize.search_command, look.convert_command),
    *(look.check_command, look.explain_command, look.inspect_command),
    *(measure.infer_command, measure.evaluate_command, measure.compare_command),
    *(measure.sensitivity_command, measure.lint_data_command, look.deploy_command, look.npu_report_command),
    *(look.tools_command, look.reproduce_command, look.presets_command, look.demo_command),
)
_BARE = ("tools", "presets", "demo")  # do something without a word


def _add(command: Callable[..., None]) -> None:
    """A function NAME_command; its docstring ends in the examples, which stand below the options."""
    name = command.__name__.removesuffix("_command").replace("_", "-")
    text, word, below = (inspect.getdoc(command) or "").partition("\n\nExample")
    title, *lines = (" ".join(line.splitlines()) for line in f"{word.strip()}{below}".split("\n\n"))
    app.command(
        name,
        help=text,
        epilog="\n\n".join([f"[bold]{title.removesuffix(':')}[/]", *lines]),
        no_args_is_help=name not in _BARE,
        context_settings=look.TOOLS_SETTINGS if name == "tools" else None,
    )(command)


for _command in _COMMANDS:
    _add(_command)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"roundel {VERSION}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version and leave."
    ),
    log_file: Path | None = typer.Option(
        None, "--log-file", help="Also write every step of the run there, with the time: before the command."
    ),
) -> None:
    if log_file is None:
        return
    from roundel.model.files import check_writable

    check_writable(log_file)
    token = options.LOG.set(context.with_resource(log_file.open("a", encoding="utf-8")))
    context.call_on_close(lambda: options.LOG.reset(token))


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
