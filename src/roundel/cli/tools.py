"""`roundel tools`."""

from __future__ import annotations

import sys

import typer

_EPILOG = """[bold]Examples[/]

roundel tools                                                     (lists them)

roundel tools convert_s8s8_to_u8s8 model.onnx model.u8.onnx

roundel tools remove_qdq_between_ops --input_model a.onnx --between_ops 'Mul,Add' --output_model b.onnx
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    # The tools read their own arguments, --help included, under the names that the documents give them.
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["--about"]}
    app.command(epilog=_EPILOG, context_settings=settings)(tools)


def tools(context: typer.Context) -> None:
    """Converters and utilities for finished models: `roundel tools NAME --help`."""
    from roundel.quark.old_tools import OLD_TOOLS, run_tool

    name, *arguments = context.args or [""]
    if name in ("", "--help", "-h"):
        width = max(map(len, OLD_TOOLS)) + 2
        rows = (f"{tool.name:<{width}}{tool.summary}" for tool in OLD_TOOLS.values())
        sys.stdout.write("\n".join(["roundel tools NAME [ARGUMENT …]", "", *rows]) + "\n")
        return
    run_tool(name, arguments)
