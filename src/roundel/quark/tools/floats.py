"""Whole models to short floats and back, and the forms that these are written in."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from roundel.conversion import convert
from roundel.errors import ModelError, RecipeError, did_you_mean
from roundel.model.graph import constant_array, is_constant
from roundel.numerics.floats import largest
from roundel.passes import refresh_shapes
from roundel.pipeline import quantize
from roundel.qdq.nodes import Names, constant
from roundel.quark.tools.tool import (
    EXTERNAL,
    SOURCE,
    TARGET,
    Parameter,
    Rewritten,
    Tool,
    refuse_same,
    rewriting,
)
from roundel.quark.tools.wiring import is_quantize, tidy
from roundel.types import FloatType

_FULL, _HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16
# Inputs that are float32 by the operator's definition, from this index on.
_ALWAYS_FULL = {"Resize": 1, "Upsample": 1}
_LARGEST = float(np.finfo(np.float16).max)


def convert_fp32_to_fp16(model: ir.Model, keep_io_types: bool = False) -> Rewritten:
    """Every float32 tensor becomes float16; graph inputs and outputs stay float32 when asked for.

    Raises:
        ModelError: the model holds quantized tensors, or bodies of If, Loop or Scan.
    """
    result = model.clone()
    _refuse(result)
    refresh_shapes(result)
    if keep_io_types:
        _cast_borders(result.graph)
    kept = set(result.graph.inputs) | set(result.graph.outputs) if keep_io_types else set()
    constants = list(_narrow_constants(result.graph))
    for value in (*result.graph.inputs, *(v for node in result.graph for v in node.outputs)):
        if value.dtype is _FULL and value not in kept:
            value.type = ir.TensorType(_HALF)
    for node in result.graph:
        _narrow_attributes(node)
    return tidy(result), f"{len(constants)} constants and all tensors between nodes in float16"


def _refuse(model: ir.Model) -> None:
    for node in model.graph.all_nodes():
        if node.graph is not model.graph:
            raise ModelError("Bodies of If, Loop and Scan cannot be narrowed.", where=f"node '{node.name}'")
        if "QuantizeLinear" in node.op_type or "DequantizeLinear" in node.op_type:
            raise ModelError(
                "The model is quantized.",
                where=f"node '{node.name}'",
                expected="a float32 model",
                hint="Take the pairs out first: roundel tools remove_qdq.",
            )


def _cast_borders(graph: ir.Graph) -> None:
    """A Cast behind each float32 input and before each float32 output."""
    names = Names(graph)
    for value in [v for v in graph.inputs if v.dtype is _FULL]:
        uses = list(value.uses())
        cast = _cast(value, names(f"{value.name}_half"), _HALF)
        for use in uses:
            use.node.replace_input_with(use.idx, cast.outputs[0])
        graph.insert_before(graph[0], cast)
    for index, value in enumerate(list(graph.outputs)):
        if value.dtype is not _FULL or value.producer() is None:
            continue
        name = str(value.name)
        value.name = names(f"{name}_half")
        cast = _cast(value, name, _FULL)
        graph.append(cast)
        graph.outputs[index] = cast.outputs[0]


def _cast(value: ir.Value, name: str, dtype: ir.DataType) -> ir.Node:
    out = ir.Value(name=name, shape=value.shape, type=ir.TensorType(dtype))
    attribute = ir.AttrInt64("to", dtype.value)
    return ir.Node("", "Cast", [value], attributes=[attribute], outputs=[out], name=f"{name}_cast")


def _narrow_constants(graph: ir.Graph) -> Iterator[ir.Value]:
    for value in list(graph.initializers.values()):
        array = constant_array(value)
        if array is None or array.dtype != np.float32 or _needs_full(value):
            continue
        value.const_value = ir.tensor(np.clip(array, -_LARGEST, _LARGEST).astype(np.float16), name=value.name)
        value.type = ir.TensorType(_HALF)
        yield value


def _needs_full(value: ir.Value) -> bool:
    return any(use.idx >= _ALWAYS_FULL.get(use.node.op_type, 1000) for use in value.uses())


def _narrow_attributes(node: ir.Node) -> None:
    leaves = node.op_type == "Cast" and node.outputs[0].dtype is _FULL
    for name, attribute in list(node.attributes.items()):
        if attribute.type is ir.AttributeType.TENSOR and attribute.as_tensor().dtype is _FULL:
            array = attribute.as_tensor().numpy().astype(np.float16)
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(array))
        elif name in ("to", "dtype") and attribute.value == _FULL.value and not leaves:
            node.attributes[name] = ir.AttrInt64(name, _HALF.value)


_FORMS = {"with_cast": "cast", "customqdq": "pair", "simulate_bf16": "plain"}
_FORMAT = Parameter(
    "form",
    "with_cast, customqdq or simulate_bf16",
    ("--format",),
    default="with_cast",
    positional=False,
)


def _to_bf16(source: str, target: str, form: str, external_data: bool) -> str:
    refuse_same(source, target)
    if form == "bf16":
        raise RecipeError(
            "Graphs of bfloat16 tensors run nowhere: neither the NPU's compiler nor the CPU takes them.",
            where="--format bf16",
            hint="Use with_cast, which computes the same numbers.",
        )
    if form not in _FORMS:
        raise RecipeError(
            f"There is no format '{form}'.", expected=", ".join(_FORMS), hint=did_you_mean(form, _FORMS)
        )
    done = convert(source, target, to="bf16", form=_FORMS[form], external_data=external_data)  # type: ignore[arg-type]
    counts = ", ".join(f"{count} {what}" for what, count in done.counts.items())
    return f"{counts} in bfloat16\n{target}"


def _to_fp32(source: str, target: str, external_data: bool) -> str:
    refuse_same(source, target)
    convert(source, target, to="fp32", external_data=external_data)
    return f"all tensors in float32\n{target}"


def _to_bfp16(source: str, target: str, external_data: bool) -> str:
    refuse_same(source, target)
    result = quantize(source, target, recipe="bfp16", changes={"output": {"external_data": external_data}})
    return f"{len(result.plan.tensors)} tensors in bfp16\n{target}"


def _as_form(form: str) -> object:
    def run(source: str, target: str, external_data: bool) -> str:
        refuse_same(source, target)
        convert(source, target, to="bf16", form=form, external_data=external_data)  # type: ignore[arg-type]
        return f"bfloat16 tensors in the form '{form}'\n{target}"

    return run


def insert_clip_bfloat16_qdq(model: ir.Model) -> Rewritten:
    """A Clip to bfloat16's finite range before each activation that a pair rounds to it."""
    result = model.clone()
    names, bound, count = Names(result.graph), largest(FloatType.BFLOAT16), 0
    limits: tuple[ir.Value, ir.Value] | None = None
    for node in [n for n in result.graph if is_quantize(n)]:
        value, zero = node.inputs[0], node.inputs[2] if len(node.inputs) > 2 else None
        if value is None or is_constant(value) or zero is None or zero.dtype is not ir.DataType.BFLOAT16:
            continue
        if limits is None:
            ends = (np.float32(-bound), np.float32(bound))
            limits = tuple(constant(result.graph, names("bf16_limit"), np.asarray(e)) for e in ends)  # type: ignore[assignment]
        assert limits is not None
        out = ir.Value(name=names(f"{value.name}_clipped"), shape=value.shape, type=value.type)
        clip = ir.Node("", "Clip", [value, *limits], outputs=[out], name=names(f"{node.name}_clip"))
        result.graph.insert_before(node, clip)
        node.replace_input_with(0, out)
        count += 1
    return tidy(result), f"inserted {count} Clip nodes"


_KEEP_IO = Parameter(
    "keep_io_types",
    "graph inputs and outputs stay float32",
    ("--keep_io_types",),
    default=False,
    positional=False,
    switch=True,
)
_FILES = (SOURCE, TARGET, EXTERNAL)

FLOAT_TOOLS = (
    Tool("convert_fp32_to_bf16", "A float32 model in bfloat16.", _to_bf16, (*_FILES, _FORMAT)),
    Tool("convert_fp16_to_bf16", "A float16 model in bfloat16.", _to_bf16, (*_FILES, _FORMAT)),
    Tool("convert_fp32_to_bfp16", "A float32 model in block floating point.", _to_bfp16, _FILES),
    Tool("convert_fp16_to_bfp16", "A float16 model in block floating point.", _to_bfp16, _FILES),
    rewriting("convert_fp32_to_fp16", "A float32 model in float16.", convert_fp32_to_fp16, _KEEP_IO),
    Tool("convert_fp16_to_fp32", "A float16 model, or any short-float form, in float32.", _to_fp32, _FILES),
    Tool(
        "replace_bfloat16_qdq_cast",
        "bfloat16 pairs of AMD's operators as Cast pairs.",
        _as_form("cast"),  # type: ignore[arg-type]
        _FILES,
    ),
    Tool(
        "remove_bf16_cast",
        "bfloat16 casts between nodes taken out; constants keep their rounding.",
        _as_form("plain"),  # type: ignore[arg-type]
        _FILES,
    ),
    rewriting(
        "insert_clip_bfloat16_qdq", "A Clip before each bfloat16 activation.", insert_clip_bfloat16_qdq
    ),
)
