"""Converters and utilities for finished models, each a pure function of a model and a command."""

from __future__ import annotations

from collections.abc import Mapping

from roundel.errors import RecipeError, did_you_mean
from roundel.quark.tools import floats, operators, retyping
from roundel.quark.tools.floats import FLOAT_TOOLS
from roundel.quark.tools.tool import Parameter, Tool, rewriting, shapes, switch, words
from roundel.quark.tools.views import EVALUATE, HISTOGRAM_TOOLS, PRINT_NODES, TEXT_TOOLS

__all__ = ["TOOLS", "Tool", "tool_named"]


def operator_pairs(text: str) -> list[tuple[str, str]]:
    """'Conv,Relu;Mul,Add' as pairs."""
    found = []
    for item in filter(str.strip, text.split(";")):
        maker, comma, reader = item.partition(",")
        if not comma:
            raise ValueError(item)
        found.append((maker.strip(), reader.strip()))
    return found


_BETWEEN = Parameter(
    "between_ops",
    "'Conv,Relu;Mul,Add'",
    ("--between_ops",),
    operator_pairs,
    positional=False,
)
_SHAPES = Parameter(
    "fix_shapes", "'input_1:[1,3,224,224];input_2:[1,96]'", ("--fix_shapes",), shapes, None, positional=False
)
_OPSET = Parameter("target_opset", "for example 17", ("--target_opset",), int)
_TYPES = Parameter(
    "op_types", "'Conv,Gemm'; all when not given", ("--op_types",), words, (), positional=False
)
_INFINITE = Parameter(
    "replace_inf_value", "in place of infinity", ("--replace_inf_value",), float, 10000.0, positional=False
)
_REVERSE = switch("reverse_conversion", "older names to today's", "--reverse_conversion")

_ALL: tuple[Tool, ...] = (
    EVALUATE,
    *FLOAT_TOOLS,
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
    *TEXT_TOOLS,
    *HISTOGRAM_TOOLS,
    PRINT_NODES,
)
TOOLS: Mapping[str, Tool] = {tool.name: tool for tool in _ALL}


def tool_named(name: str, more: Mapping[str, Tool] | None = None) -> Tool:
    """The tool of that name.

    Raises:
        RecipeError: there is none.
    """
    known = {**TOOLS, **(more or {})}
    if name not in known:
        raise RecipeError(
            f"There is no tool '{name}'.",
            hint=did_you_mean(name, known) or "List them with `roundel tools`.",
        )
    return known[name]
