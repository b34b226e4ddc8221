"""The documents' tools under their old module names."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType

from roundel.quark.config import Config
from roundel.quark.enums import PowerOfTwoMethod
from roundel.quark.errors import QuarkConfigError
from roundel.quark.importing import TOOL_PREFIX
from roundel.quark.presets import get_default_config
from roundel.quark.quantizer import ModelQuantizer
from roundel.quark.tools import TOOLS, Tool, tool_named
from roundel.quark.tools.tool import EXTERNAL, SOURCE, TARGET, Parameter

_EXCLUDE = Parameter(
    "exclude_nodes", "node names, separated by ;", ("--exclude_nodes",), default="", positional=False
)
_SUBGRAPHS = Parameter(
    "exclude_subgraphs", "'([start, …], [end, …]); …'", ("--exclude_subgraphs",), default="", positional=False
)
_CONFIG = Parameter("config", "preset name", ("--config",), default="XINT8", positional=False)


def random_quantize(
    source: str, target: str, config: str, exclude_nodes: str, exclude_subgraphs: str, external_data: bool
) -> str:
    """Quantize with random data: for a look at placement and speed, not for accuracy."""
    settings = get_default_config(config)
    settings.extra_options["UseRandomData"] = True
    settings.use_external_data_format = external_data
    settings.nodes_to_exclude = [name.strip() for name in exclude_nodes.split(";") if name.strip()]
    settings.subgraphs_to_exclude = [_subgraph(text) for text in exclude_subgraphs.split(";") if text.strip()]
    if config == "XINT8":
        settings.calibrate_method = PowerOfTwoMethod.NonOverflow
    ModelQuantizer(Config(settings)).quantize_model(source, target)
    return target


def _subgraph(text: str) -> tuple[list[str], list[str]]:
    """'([a, b], [c])' as two lists."""
    parts = [part.split("]")[0] for part in text.split("[")[1:]]
    if len(parts) != 2:
        raise QuarkConfigError(
            "A subgraph cannot be read.", observed=text, expected="([start nodes], [end nodes])"
        )
    starts, ends = ([name.strip(" '\"") for name in part.split(",") if name.strip()] for part in parts)
    return starts, ends


RANDOM_QUANTIZE = Tool(
    "random_quantize",
    "Quantizes with random data: for a look at placement and speed.",
    random_quantize,
    (SOURCE, TARGET, _CONFIG, _EXCLUDE, _SUBGRAPHS, EXTERNAL),
)
OLD_TOOLS: Mapping[str, Tool] = {**TOOLS, "random_quantize": RANDOM_QUANTIZE}


def run_tool(name: str, arguments: list[str]) -> int:
    """Run a tool from the command line; returns the exit status."""
    sys.stdout.write(tool_named(name, OLD_TOOLS)(arguments) + "\n")
    return 0


def tool_module(name: str) -> ModuleType:
    """A module `quark.onnx.tools.NAME` with the tool's function and its `main`."""
    module = ModuleType(name)
    tool = tool_named(name.removeprefix(TOOL_PREFIX), OLD_TOOLS)

    def main() -> None:
        run_tool(tool.name, sys.argv[1:])

    vars(module).update({"__doc__": tool.summary, "main": main, "run_main": main, **tool.exports})
    return module
