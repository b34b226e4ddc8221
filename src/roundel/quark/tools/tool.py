"""What a tool is: a function, and its arguments under every name that the documents give them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import onnx_ir as ir

from roundel.errors import ModelError, OutputError, RecipeError
from roundel.model.files import check_writable, save_model
from roundel.model.load import ModelSource, load_model
from roundel.passes.cleanup import remove_dead_code
from roundel.qdq.functions import attach
from roundel.qdq.nodes import QUARK
from roundel.qdq.read import is_dequantize

P = ParamSpec("P")
REQUIRED: Any = object()
LAYERS = ("Conv", "ConvTranspose", "Gemm")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument.

    Args:
        name: as the tool's function calls it.
        help: one line.
        flags: its spellings on the command line.
        kind: makes a value of the text.
        default: taken where it is not given; REQUIRED where it must be.
        positional: whether it may also be given by its place.
        switch: a flag without a value.
    """

    name: str
    help: str
    flags: tuple[str, ...]
    kind: Callable[[str], Any] = str
    default: Any = REQUIRED
    positional: bool = True
    switch: bool = False

    @property
    def spellings(self) -> tuple[str, ...]:
        """Its names without dashes."""
        return tuple(dict.fromkeys((self.name, *(flag.lstrip("-") for flag in self.flags))))


SOURCE = Parameter(
    "source", "the ONNX model to read", ("--input", "--input_model", "--input_model_path", "--model_input")
)
TARGET = Parameter(
    "target",
    "the ONNX model to write",
    ("--output", "--output_model", "--output_model_path", "--model_output", "--quantized_model_path"),
)


def switch(name: str, line: str, *flags: str) -> Parameter:
    """A flag without a value."""
    return Parameter(name, line, flags, default=False, positional=False, switch=True)


def option(name: str, line: str, kind: Callable[[str], Any] = str, default: Any = REQUIRED) -> Parameter:
    """What is given as `--name VALUE` only."""
    return Parameter(name, line, (f"--{name}",), kind, default, positional=False)


EXTERNAL = switch(
    "external_data", "keep the weights in a file of their own", "--save_as_external_data", "--external_data"
)


@dataclass(frozen=True, slots=True)
class Tool:
    """A command: its name, one line about it, what it does with its arguments, and these.

    `run` takes the arguments by name and returns what to print.
    """

    name: str
    summary: str
    run: Callable[..., str]
    parameters: tuple[Parameter, ...] = (SOURCE, TARGET)
    exports: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, arguments: Sequence[str]) -> str:
        """Parse the command line and run."""
        return self.run(**self.parse(arguments))

    def parse(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Arguments by name; those without a flag fill the places that are left, in order."""
        parser = self._parser()
        found = vars(parser.parse_args(list(arguments)))
        places = list(found.pop("by_place"))
        for parameter in self.parameters:
            if parameter.positional and found[parameter.name] is REQUIRED and places:
                text = places.pop(0)
                try:
                    found[parameter.name] = parameter.kind(text)
                except ValueError:
                    parser.error(f"{parameter.flags[0]}: '{text}' is not what is expected here")
        missing = [p.flags[0] for p in self.parameters if found[p.name] is REQUIRED]
        if missing:
            parser.error(f"missing: {', '.join(missing)}")
        if places:
            parser.error(f"too many arguments: {' '.join(places)}")
        return found

    def called(self, *given: Any, **options: Any) -> str:
        """Run on what a script hands over: an `argparse.Namespace`, or values by place and by name.

        Raises:
            RecipeError: something is missing, unknown, or too much.
        """
        if given and isinstance(given[0], argparse.Namespace):
            return self.run(**self._filled({**vars(given[0]), **options}))
        places = [parameter for parameter in self.parameters if parameter.positional]
        if len(given) > len(places):
            raise RecipeError(f"The tool {self.name} takes {len(places)} values.", observed=len(given))
        by_place = {parameter.name: value for parameter, value in zip(places, given, strict=False)}
        known = {spelling for parameter in self.parameters for spelling in parameter.spellings}
        for word in options:
            if word not in known:
                raise RecipeError.unknown(f"The tool {self.name} has no '{word}'.", word, sorted(known))
        return self.run(**self._filled({**options, **by_place}))

    def namespace(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The command line with each value under every name that it has."""
        found = self.parse(arguments)
        return argparse.Namespace(
            **{spelling: found[p.name] for p in self.parameters for spelling in p.spellings}
        )

    def _filled(self, given: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for parameter in self.parameters:
            value = next(
                (given[s] for s in parameter.spellings if given.get(s) is not None), parameter.default
            )
            if value is REQUIRED:
                what = f"The tool {self.name} needs '{parameter.name}': {parameter.help}."
                raise RecipeError(what, expected=" or ".join(parameter.spellings))
            found[parameter.name] = parameter.kind(value) if isinstance(value, str) else value
        return found

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            prog=f"roundel tools {self.name}", description=self.summary, allow_abbrev=False
        )
        order = " ".join(p.name.upper() for p in self.parameters if p.positional)
        parser.add_argument(
            "by_place", nargs="*", metavar="VALUE", help=f"by place: {order}" if order else ""
        )
        for parameter in self.parameters:
            how: dict[str, Any] = {"type": parameter.kind, "default": parameter.default}
            how = {"action": "store_true"} if parameter.switch else {**how, "metavar": parameter.name.upper()}
            parser.add_argument(*parameter.flags, dest=parameter.name, help=parameter.help, **how)
        return parser


def words(text: str) -> tuple[str, ...]:
    """'Conv,Gemm', or the same with brackets and quotes around."""
    return tuple(word for word in (part.strip(" []'\"") for part in text.split(",")) if word)


Rewrite = Callable[..., "Rewritten"]
Rewritten = tuple[ir.Model, str]
"""The new model, and a sentence about what changed."""


def dequantizer(value: ir.Value | None) -> ir.Node | None:
    """The DQ node that makes the value, if one does."""
    maker = value.producer() if value is not None else None
    return maker if is_dequantize(maker) else None


def read_model(source: ModelSource) -> ir.Model:
    """A model of any kind; AMD's operators stay nodes."""
    return load_model(source, allow_quantized=True, opaque=QUARK).model


def _with_bodies(model: ir.Model) -> ir.Model:
    """The model to write: AMD's operators get the bodies that let a stock ONNX Runtime run them."""
    if all(node.domain != QUARK for node in model.graph.all_nodes()):
        return model
    try:
        return attach(model)
    except ModelError:  # an operator without a body needs AMD's library, as it did before
        return model


def on_copy(edit: Callable[Concatenate[ir.Model, P], str]) -> Callable[Concatenate[ir.Model, P], Rewritten]:
    """A pure function out of one that edits a model in place and says what it did."""

    @wraps(edit)
    def work(model: ir.Model, /, *args: P.args, **kwargs: P.kwargs) -> Rewritten:
        result = model.clone()
        done = edit(result, *args, **kwargs)
        remove_dead_code(result)
        result.graph.sort()
        return result, done

    return work


def from_file_to_file(
    name: str,
    summary: str,
    work: Callable[..., str],
    parameters: tuple[Parameter, ...],
    export: Callable[..., Any] | None = None,
) -> Tool:
    """A tool that refuses to write over what it reads, and names the file that it wrote."""

    def run(source: str, target: str, **arguments: Any) -> str:
        check_writable(Path(target))
        if Path(target).exists() and Path(source).exists() and Path(target).samefile(source):
            raise OutputError(
                "The output would overwrite the input.", where=target, hint="Choose another path."
            )
        return f"{work(source, target, **arguments)}\n{target}"

    return Tool(name, summary, run, parameters, {} if export is None else {name: export})


def rewriting(summary: str, work: Rewrite, *more: Parameter, name: str = "") -> Tool:
    """A tool that reads a model, rewrites it and writes another file.

    Args:
        summary: one line.
        work: a pure function of a model and the further arguments by name.
        more: further parameters; those given by place come between the two files or after them.
        name: of the tool; the function's own when not given.
    """

    def run(source: str, target: str, external_data: bool, **arguments: Any) -> str:
        model, done = work(read_model(source), **arguments)
        save_model(_with_bodies(model), Path(target), external_data=external_data)
        return done

    inner = [parameter for parameter in more if parameter.positional]
    rest = [parameter for parameter in more if not parameter.positional]
    parameters = (SOURCE, *inner, TARGET, *rest, EXTERNAL)
    return from_file_to_file(name or work.__name__, summary, run, parameters, _on_any(work))


def _on_any(work: Rewrite) -> Callable[..., Any]:
    """The function for scripts that import it: a ModelProto (or file) in, a ModelProto out."""

    def convert(model: ModelSource, *arguments: Any, **options: Any) -> Any:
        return ir.to_proto(_with_bodies(work(read_model(model), *arguments, **options)[0]))

    convert.__doc__ = work.__doc__
    return convert
