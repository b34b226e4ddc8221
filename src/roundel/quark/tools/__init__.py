"""Converters and utilities for finished models, each a pure function of a model and a command."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx

from roundel.errors import RecipeError, did_you_mean
from roundel.model.load import ModelSource
from roundel.quark.config import Config
from roundel.quark.enums import PowerOfTwoMethod
from roundel.quark.errors import QuarkConfigError
from roundel.quark.options import shapes
from roundel.quark.presets import get_default_config
from roundel.quark.quantizer import ModelQuantizer
from roundel.quark.tools import floats, operators, retyping, tool, views
from roundel.quark.tools.tool import Parameter, Tool, option, rewriting, switch, words


def operator_pairs(text: str) -> list[tuple[str, str]]:
    """'Conv,Relu;Mul,Add' as pairs."""
    found = [item.split(",", 1) for item in filter(str.strip, text.split(";"))]
    return [(maker.strip(), reader.strip()) for maker, reader in found]


_BETWEEN = option("between_ops", "'Conv,Relu;Mul,Add'", operator_pairs)
_SHAPES = option("fix_shapes", "'input_1:[1,3,224,224];input_2:[1,96]'", shapes, None)
_OPSET = Parameter("target_opset", "for example 17", ("--target_opset",), int)
_TYPES = option("op_types", "'Conv,Gemm'; all when not given", words, ())
_PREFIX = option("prefix", "of the copies' names", default="")
_BIASES = switch("only_bias", "copy biases only", "--only_bias")
_INFINITE = option("replace_inf_value", "in place of infinity", float, 10000.0)
_REVERSE = switch("reverse_conversion", "older names to today's", "--reverse_conversion")
_EXCLUDE = option("exclude_nodes", "node names, separated by ;", default="")
_SUBGRAPHS = option("exclude_subgraphs", "'([start, …], [end, …]); …'", default="")
_CONFIG = option("config", "preset name", default="XINT8")


def random_quantize(
    source: str, target: str, config: str, exclude_nodes: str, exclude_subgraphs: str, external_data: bool
) -> str:
    """Quantize with random data: for a look at placement and speed, not for accuracy."""
    settings = get_default_config(config)
    settings.extra_options["UseRandomData"] = True
    settings.use_external_data_format = external_data
    settings.nodes_to_exclude = [name.strip() for name in exclude_nodes.split(";") if name.strip()]
    settings.subgraphs_to_exclude = subgraphs(exclude_subgraphs)
    if config == "XINT8":
        settings.calibrate_method = PowerOfTwoMethod.NonOverflow
    ModelQuantizer(Config(settings)).quantize_model(source, target)
    return target


def subgraphs(text: str) -> list[tuple[list[str], list[str]]]:
    """'([a, b], [c]); ([d], [e])' as pairs of lists."""
    return [_subgraph(part) for part in text.split(";") if part.strip()]


def _subgraph(text: str) -> tuple[list[str], list[str]]:
    """'([a, b], [c])' as two lists."""
    parts = [part.split("]")[0] for part in text.split("[")[1:]]
    if len(parts) != 2:
        raise QuarkConfigError(
            "A subgraph cannot be read.", observed=text, expected="([start nodes], [end nodes])"
        )
    starts, ends = ([name.strip(" '\"") for name in part.split(",") if name.strip()] for part in parts)
    return starts, ends


_UNSHARE = rewriting(
    "A copy of a shared weight for each reader.",
    floats.convert_shared_initializer_to_unique,
    *(_TYPES, _PREFIX, _BIASES),
)
_FINITE = rewriting("Finite numbers for infinite weights.", floats.replace_inf_weights, _INFINITE)


def unshared(
    onnx_model: ModelSource,
    support_op_types: Sequence[str] = (),
    prefix: str = "duplicated",
    only_bias: bool = False,
) -> onnx.ModelProto:
    """The model with a copy of a shared weight for each reader, under the names that scripts know."""
    work = _UNSHARE.exports[_UNSHARE.name]
    made: onnx.ModelProto = work(onnx_model, tuple(support_op_types), prefix=prefix, only_bias=only_bias)
    return made


_ALL: tuple[Tool, ...] = (
    views.EVALUATE,
    *floats.FLOAT_TOOLS,
    rewriting("8-bit biases as 32-bit ones.", retyping.convert_a8w8_npu_to_a8w8_cpu),
    rewriting("32-bit biases as 16-bit ones.", retyping.convert_bias_int32_to_int16),
    rewriting("AMD's Q/DQ operators as ONNX Runtime's.", operators.convert_customqdq_to_qdq),
    rewriting("Q/DQ operators as AMD's.", operators.convert_qdq_to_customqdq),
    rewriting("AMD's operators by their older names.", operators.convert_custom_ops, _REVERSE),
    rewriting("QLinear operators in place of Q/DQ pairs.", operators.convert_qdq_to_qop),
    rewriting("A quantized model as a float model.", operators.remove_qdq, name="convert_quant_to_float"),
    rewriting("A model without its Q/DQ pairs.", operators.remove_qdq),
    rewriting("No pairs between Mul and Add.", operators.remove_qdq_mul_add),
    rewriting("No pairs between given operators.", operators.remove_qdq_between_ops, _BETWEEN),
    rewriting("int8 activations as uint8; exact.", retyping.convert_s8s8_to_u8s8),
    rewriting("uint16 activations as int16; exact.", retyping.convert_u16s8_to_s16s8),
    rewriting("uint16 activations as uint8.", retyping.convert_u16u8_to_u8u8),
    rewriting("Power-of-two scales around Resize.", retyping.convert_resize_fs_to_pof2s),
    rewriting("Inputs and outputs with channels last.", floats.convert_nchw_to_nhwc),
    rewriting("Another opset.", floats.convert_opset_version, _OPSET),
    rewriting(
        "Fixed sizes for open dimensions.", floats.fix_shapes, _SHAPES, name="convert_dynamic_to_fixed"
    ),
    rewriting("Fixed sizes for open dimensions.", floats.fix_shapes, _SHAPES),
    rewriting("Weights off the input list.", floats.remove_initializer_from_input),
    replace(_UNSHARE, exports={**_UNSHARE.exports, "convert": unshared}),
    replace(_FINITE, exports={**_FINITE.exports, "replace_inf_in_onnx_weights": _FINITE.called}),
    *views.TEXT_TOOLS,
    *views.HISTOGRAM_TOOLS,
    views.PRINT_NODES,
    Tool(
        "random_quantize",
        "Quantizes with random data: for a look at placement and speed.",
        random_quantize,
        (tool.SOURCE, tool.TARGET, _CONFIG, _EXCLUDE, _SUBGRAPHS, tool.EXTERNAL),
    ),
)
TOOLS: Mapping[str, Tool] = {known.name: known for known in _ALL}


def tool_named(name: str) -> Tool:
    """The tool of that name.

    Raises:
        RecipeError: there is none.
    """
    if name not in TOOLS:
        hint = did_you_mean(name, TOOLS) or "List them with `roundel tools`."
        raise RecipeError(f"There is no tool '{name}'.", hint=hint)
    return TOOLS[name]


def run_tool(name: str, arguments: list[str]) -> int:
    """Run a tool from the command line; returns the exit status."""
    sys.stdout.write(tool_named(name)(arguments) + "\n")
    return 0


def tool_module(path: str) -> ModuleType:
    """A module `quark.onnx.tools.NAME`: functions on models and on arguments, and `main`."""
    module = ModuleType(path)
    found = tool_named(path.rpartition(".")[2])
    on_model = found.exports.get(found.name)

    def parse_args() -> Namespace:
        return found.namespace(sys.argv[1:])

    def main(*arguments: Any, **options: Any) -> None:
        if not arguments and not options:
            arguments = (parse_args(),)
        sys.stdout.write(found.called(*arguments, **options) + "\n")

    def convert(*arguments: Any, **options: Any) -> Any:
        if on_model is None or _files(arguments) or isinstance(arguments[0], Namespace):
            return main(*arguments, **options)
        return on_model(*arguments, **options)

    convert.__doc__ = on_model.__doc__ if on_model is not None else found.summary
    names = {
        "main": main,
        "run_main": main,
        "parse_args": parse_args,
        "convert": convert,
        found.name: convert,
    }
    own = {name: function for name, function in found.exports.items() if name != found.name}
    vars(module).update({"__doc__": found.summary, **names, **own})
    return module


def _files(arguments: Sequence[Any]) -> bool:
    """Whether a file is to be written, rather than a model returned."""
    return len(arguments) > 1 and all(isinstance(path, str | Path) for path in arguments[:2])
