"""Converters and utilities for finished models, each a pure function of a model and a command."""

from __future__ import annotations

from collections.abc import Mapping

from roundel.errors import RecipeError, did_you_mean
from roundel.quark.tools.floats import FLOAT_TOOLS
from roundel.quark.tools.graphs import (
    convert_nchw_to_nhwc,
    convert_opset_version,
    convert_shared_initializer_to_unique,
    fix_shapes,
    remove_initializer_from_input,
    replace_inf_weights,
)
from roundel.quark.tools.operators import (
    convert_custom_ops,
    convert_customqdq_to_qdq,
    convert_qdq_to_customqdq,
    convert_qdq_to_qop,
    operator_pairs,
    remove_qdq,
    remove_qdq_between_ops,
    remove_qdq_mul_add,
)
from roundel.quark.tools.retyping import (
    convert_a8w8_npu_to_a8w8_cpu,
    convert_bias_int32_to_int16,
    convert_resize_fs_to_pof2s,
    convert_s8s8_to_u8s8,
    convert_u16s8_to_s16s8,
    convert_u16u8_to_u8u8,
)
from roundel.quark.tools.tool import Parameter, Tool, rewriting, shapes, words
from roundel.quark.tools.views import EVALUATE, HISTOGRAM_TOOLS, PRINT_NODES, TEXT_TOOLS

__all__ = ["TOOLS", "Tool", "tool_named"]

_BETWEEN = Parameter(
    "between_ops",
    "'Conv,Relu;Mul,Add': maker and reader",
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
_REVERSE = Parameter(
    "reverse_conversion",
    "older names to today's",
    ("--reverse_conversion",),
    default=False,
    positional=False,
    switch=True,
)

_ALL: tuple[Tool, ...] = (
    EVALUATE,
    *FLOAT_TOOLS,
    rewriting("convert_a8w8_npu_to_a8w8_cpu", "8-bit biases as 32-bit ones.", convert_a8w8_npu_to_a8w8_cpu),
    rewriting("convert_bias_int32_to_int16", "32-bit biases as 16-bit ones.", convert_bias_int32_to_int16),
    rewriting(
        "convert_customqdq_to_qdq", "AMD's Q/DQ operators as ONNX Runtime's.", convert_customqdq_to_qdq
    ),
    rewriting("convert_qdq_to_customqdq", "Q/DQ operators as AMD's.", convert_qdq_to_customqdq),
    rewriting("convert_custom_ops", "AMD's operators by their older names.", convert_custom_ops, _REVERSE),
    rewriting("convert_qdq_to_qop", "QLinear operators in place of Q/DQ pairs.", convert_qdq_to_qop),
    rewriting("convert_quant_to_float", "A quantized model as a float model.", remove_qdq),
    rewriting("remove_qdq", "A model without its Q/DQ pairs.", remove_qdq),
    rewriting("remove_qdq_mul_add", "No pairs between Mul and Add.", remove_qdq_mul_add),
    rewriting(
        "remove_qdq_between_ops", "No pairs between given operators.", remove_qdq_between_ops, _BETWEEN
    ),
    rewriting("convert_s8s8_to_u8s8", "int8 activations as uint8; exact.", convert_s8s8_to_u8s8),
    rewriting("convert_u16s8_to_s16s8", "uint16 activations as int16; exact.", convert_u16s8_to_s16s8),
    rewriting("convert_u16u8_to_u8u8", "uint16 activations as uint8.", convert_u16u8_to_u8u8),
    rewriting("convert_resize_fs_to_pof2s", "Power-of-two scales around Resize.", convert_resize_fs_to_pof2s),
    rewriting("convert_nchw_to_nhwc", "Inputs and outputs with channels last.", convert_nchw_to_nhwc),
    rewriting("convert_opset_version", "Another opset.", convert_opset_version, _OPSET),
    rewriting("convert_dynamic_to_fixed", "Fixed sizes for open dimensions.", fix_shapes, _SHAPES),
    rewriting("fix_shapes", "Fixed sizes for open dimensions.", fix_shapes, _SHAPES),
    rewriting("remove_initializer_from_input", "Weights off the input list.", remove_initializer_from_input),
    rewriting(
        "convert_shared_initializer_to_unique",
        "A copy of a shared weight for each reader.",
        convert_shared_initializer_to_unique,
        _TYPES,
    ),
    rewriting("replace_inf_weights", "Finite numbers for infinite weights.", replace_inf_weights, _INFINITE),
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
