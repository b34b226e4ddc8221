"""What a tool is: a function, and its arguments under every name that the documents give them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

REQUIRED: Any = object()


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


SOURCE = Parameter(
    "source", "the ONNX model to read", ("--input", "--input_model", "--input_model_path", "--model_input")
)
TARGET = Parameter(
    "target",
    "the ONNX model to write",
    ("--output", "--output_model", "--output_model_path", "--model_output", "--quantized_model_path"),
)
EXTERNAL = Parameter(
    "external_data",
    "keep the weights in a file of their own",
    ("--save_as_external_data", "--external_data"),
    default=False,
    positional=False,
    switch=True,
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
                found[parameter.name] = self._value(parser, parameter, places.pop(0))
        missing = [p.flags[0] for p in self.parameters if found[p.name] is REQUIRED]
        if missing:
            parser.error(f"missing: {', '.join(missing)}")
        if places:
            parser.error(f"too many arguments: {' '.join(places)}")
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
            if parameter.switch:
                parser.add_argument(
                    *parameter.flags, dest=parameter.name, action="store_true", help=parameter.help
                )
            else:
                parser.add_argument(
                    *parameter.flags,
                    dest=parameter.name,
                    type=parameter.kind,
                    default=parameter.default,
                    metavar=parameter.name.upper(),
                    help=parameter.help,
                )
        return parser

    def _value(self, parser: argparse.ArgumentParser, parameter: Parameter, text: str) -> Any:
        try:
            return parameter.kind(text)
        except ValueError:
            parser.error(f"{parameter.flags[0]}: '{text}' is not what is expected here")
