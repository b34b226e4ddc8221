"""Models from and to files, and tools that turn one model into another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir

from roundel.errors import ModelError, OutputError
from roundel.model.files import check_writable, save_model
from roundel.model.load import ModelSource, load_model
from roundel.qdq.functions import attach
from roundel.qdq.nodes import QUARK
from roundel.quark.tools.tool import EXTERNAL, SOURCE, TARGET, Parameter, Tool

Rewrite = Callable[..., "Rewritten"]
Rewritten = tuple[ir.Model, str]
"""The new model, and a sentence about what changed."""


def read_model(source: ModelSource) -> ir.Model:
    """A model of any kind; AMD's operators stay nodes."""
    return load_model(source, allow_quantized=True, opaque=QUARK).model


def write_model(model: ir.Model, target: str | Path, *, external_data: bool = False) -> None:
    """Save a model; AMD's operators get the bodies that let a stock ONNX Runtime run them."""
    save_model(_with_bodies(model), Path(target), external_data=external_data)


def _with_bodies(model: ir.Model) -> ir.Model:
    if all(node.domain != QUARK for node in model.graph.all_nodes()):
        return model
    try:
        return attach(model)
    except ModelError:  # an operator without a body needs AMD's library, as it did before
        return model


def rewriting(name: str, summary: str, work: Rewrite, *more: Parameter) -> Tool:
    """A tool that reads a model, rewrites it and writes another file.

    Args:
        name: of the tool.
        summary: one line.
        work: a pure function of a model and the further arguments by name.
        more: further parameters; those given by place come between the two files or after them.
    """

    def run(source: str, target: str, external_data: bool, **arguments: Any) -> str:
        refuse_same(source, target)
        model, done = work(read_model(source), **arguments)
        write_model(model, target, external_data=external_data)
        return f"{done}\n{target}"

    return Tool(name, summary, run, _ordered(more), {name: _on_any(work)})


def refuse_same(source: str, target: str) -> None:
    """Fail before any work where the target cannot be written or is the source itself."""
    check_writable(Path(target))
    if Path(target).exists() and Path(source).exists() and Path(target).samefile(source):
        raise OutputError("The output would overwrite the input.", where=target, hint="Choose another path.")


def _ordered(more: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    inner = [p for p in more if p.positional]
    rest = [p for p in more if not p.positional]
    return (SOURCE, *inner, TARGET, *rest, EXTERNAL)


def _on_any(work: Rewrite) -> Callable[..., Any]:
    """The function for scripts that import it: a ModelProto (or file) in, a ModelProto out."""

    def convert(model: ModelSource, *arguments: Any, **options: Any) -> Any:
        return ir.to_proto(_with_bodies(work(read_model(model), *arguments, **options)[0]))

    convert.__doc__ = work.__doc__
    return convert
