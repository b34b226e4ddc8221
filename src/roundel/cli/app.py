"""The `roundel` command and its sub-commands. Heavy imports stay inside the commands."""

from __future__ import annotations

import sys

import typer

from roundel.cli import demo, explain, inspect, presets, quantize
from roundel.errors import RoundelError

app = typer.Typer(
    name="roundel",
    help="Quantize neural networks for AMD Ryzen AI NPUs.",
    epilog="First look: roundel demo. Own model: roundel quantize MODEL -o OUT --data DIR.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

for _command in (quantize, explain, inspect, presets, demo):
    _command.register(app)


def _version(value: bool) -> None:
    if value:
        from roundel import __version__

        typer.echo(f"roundel {__version__}")
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
    try:
        app()
    except RoundelError as error:
        _report(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: nothing was written\n")
        sys.exit(130)


def _report(error: RoundelError) -> None:
    if "--json" in sys.argv:
        import json

        details = dict(error.details())
        sys.stdout.write(json.dumps({"error": type(error).__name__, "what": error.what, **details}) + "\n")
        return
    from rich.console import Console

    from roundel.report.console import show_error

    show_error(Console(stderr=True), error)
