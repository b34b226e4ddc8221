"""Converters and utilities for finished models, each a pure function of a model and a command."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType

from roundel.errors import RecipeError, did_you_mean
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
    rewriting(
        "A copy of a shared weight for each reader.", floats.convert_shared_initializer_to_unique, _TYPES
    ),
    rewriting("Finite numbers for infinite weights.", floats.replace_inf_weights, _INFINITE),
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
    """A module `quark.onnx.tools.NAME` with the tool's function and its `main`."""
    module = ModuleType(path)
    found = tool_named(path.rpartition(".")[2])

    def main() -> None:
        run_tool(found.name, sys.argv[1:])

    vars(module).update({"__doc__": found.summary, "main": main, "run_main": main, **found.exports})
    return module
