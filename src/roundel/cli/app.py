"""The `roundel` command and its sub-commands. Heavy imports stay inside the commands."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperGroup

from roundel.cli import choose, look, measure, npu, quantize
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

_COMMANDS: tuple[tuple[str, Callable[..., None], str], ...] = (
    ("quantize", quantize.quantize_command, quantize.EXAMPLES),
    ("auto", choose.auto_command, choose.AUTO_EXAMPLES),
    ("search", choose.search_command, choose.SEARCH_EXAMPLES),
    ("convert", look.convert_command, look.CONVERT_EXAMPLES),
    ("check", npu.check_command, npu.CHECK_EXAMPLES),
    ("explain", look.explain_command, look.EXPLAIN_EXAMPLES),
    ("inspect", look.inspect_command, look.INSPECT_EXAMPLES),
    ("infer", measure.infer_command, measure.INFER_EXAMPLES),
    ("evaluate", measure.evaluate_command, measure.EVALUATE_EXAMPLES),
    ("compare", measure.compare_command, measure.COMPARE_EXAMPLES),
    ("sensitivity", measure.sensitivity_command, measure.SENSITIVITY_EXAMPLES),
    ("lint-data", measure.lint_data_command, measure.LINT_EXAMPLES),
    ("deploy", npu.deploy_command, npu.DEPLOY_EXAMPLES),
    ("npu-report", npu.npu_report_command, npu.REPORT_EXAMPLES),
    ("tools", look.tools_command, look.TOOLS_EXAMPLES),
    ("reproduce", look.reproduce_command, look.REPRODUCE_EXAMPLES),
    ("presets", look.presets_command, look.PRESETS_EXAMPLES),
    ("demo", look.demo_command, look.DEMO_EXAMPLES),
)
_BARE = ("tools", "presets", "demo")  # do something without a word

for _name, _run, _examples in _COMMANDS:
    _settings = look.TOOLS_SETTINGS if _name == "tools" else None
    app.command(_name, epilog=_examples, no_args_is_help=_name not in _BARE, context_settings=_settings)(_run)


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
