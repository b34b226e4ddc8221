"""Whole models to short floats and back, and the forms that these are written in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from roundel.conversion import convert
from roundel.errors import ModelError, RecipeError
from roundel.model.edit import Names, add_constant
from roundel.model.graph import constant_array, is_constant, opset_version, static_shape
from roundel.numerics.floats import largest
from roundel.passes import refresh_shapes
from roundel.passes.operators import nchw_to_nhwc
from roundel.passes.shapes import fix_input_shapes
from roundel.pipeline import quantize
from roundel.qdq.read import is_quantize
from roundel.quark.tools import tool
from roundel.types import FloatType

_FULL, _HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16
# Inputs that are float32 by the operator's definition, from this index on.
_ALWAYS_FULL = {"Resize": 1, "Upsample": 1}
_LARGEST = float(np.finfo(np.float16).max)


@tool.on_copy
def convert_fp32_to_fp16(model: ir.Model, keep_io_types: bool = False) -> str:
    """Every float32 tensor becomes float16; graph inputs and outputs stay float32 when asked for.

    Raises:
        ModelError: the model holds quantized tensors, or bodies of If, Loop or Scan.
    """
    graph = model.graph
    _refuse(model)
    refresh_shapes(model)
    if keep_io_types:
        _cast_borders(graph)
    kept = {*graph.inputs, *graph.outputs} if keep_io_types else set()
    constants = list(_narrow_constants(graph))
    for value in (*graph.inputs, *(v for node in graph for v in node.outputs)):
        if value.dtype is _FULL and value not in kept:
            value.type = ir.TensorType(_HALF)
    for node in graph:
        _narrow_attributes(node)
    return f"{len(constants)} constants and all tensors between nodes in float16"


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
        cast = _cast(value, names(f"{value.name}_half"), _HALF)
        for use in [use for use in value.uses() if use.node is not cast]:
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
    return ir.node("Cast", [value], {"to": dtype.value}, outputs=[out], name=f"{name}_cast")


def _narrow_constants(graph: ir.Graph) -> Iterator[ir.Value]:
    for value in list(graph.initializers.values()):
        array = constant_array(value)
        full = any(use.idx >= _ALWAYS_FULL.get(use.node.op_type, 1000) for use in value.uses())
        if array is None or array.dtype != np.float32 or full:
            continue
        value.const_value = ir.tensor(np.clip(array, -_LARGEST, _LARGEST).astype(np.float16), name=value.name)
        value.type = ir.TensorType(_HALF)
        yield value


def _narrow_attributes(node: ir.Node) -> None:
    leaves = node.op_type == "Cast" and node.outputs[0].dtype is _FULL
    for name, attribute in list(node.attributes.items()):
        if attribute.type is ir.AttributeType.TENSOR and attribute.as_tensor().dtype is _FULL:
            array = attribute.as_tensor().numpy().astype(np.float16)
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(array))
        elif name in ("to", "dtype") and attribute.value == _FULL.value and not leaves:
            node.attributes[name] = ir.AttrInt64(name, _HALF.value)


_FORMS = {"with_cast": "cast", "customqdq": "pair", "simulate_bf16": "plain"}
_FORMAT = tool.Parameter(
    "form", "with_cast, customqdq or simulate_bf16", ("--format",), default="with_cast", positional=False
)


def _to_bf16(source: str, target: str, form: str, external_data: bool) -> str:
    if form == "bf16":
        raise RecipeError(
            "Graphs of bfloat16 tensors run nowhere: neither the NPU's compiler nor the CPU takes them.",
            where="--format bf16",
            hint="Use with_cast, which computes the same numbers.",
        )
    if form not in _FORMS:
        raise RecipeError.unknown(f"There is no format '{form}'.", form, _FORMS)
    done = convert(source, target, to="bf16", form=_FORMS[form], external_data=external_data)  # type: ignore[arg-type]
    counts = ", ".join(f"{count} {what}" for what, count in done.counts.items())
    return f"{counts} in bfloat16"


def _to_bfp16(source: str, target: str, external_data: bool) -> str:
    result = quantize(source, target, recipe="bfp16", changes={"output": {"external_data": external_data}})
    return f"{len(result.plan.tensors)} tensors in bfp16"


def _converting(name: str, summary: str, **how: Any) -> tool.Tool:
    """A tool that converts a whole model, as `roundel.convert` does: to another type, or form."""

    def work(source: str, target: str, external_data: bool) -> str:
        convert(source, target, external_data=external_data, **how)
        form = how.get("form")
        return f"bfloat16 tensors in the form '{form}'" if form else "all tensors in float32"

    return tool.from_file_to_file(name, summary, work, _FILES)


@tool.on_copy
def insert_clip_bfloat16_qdq(model: ir.Model) -> str:
    """A Clip to bfloat16's finite range before each activation that a pair rounds to it."""
    graph, names, bound = model.graph, Names(model.graph), largest(FloatType.BFLOAT16)
    limits: list[ir.Value] = []
    count = 0
    for node in list(filter(is_quantize, graph)):
        value, zero = node.inputs[0], node.inputs[2] if len(node.inputs) > 2 else None
        if value is None or is_constant(value) or zero is None or zero.dtype is not ir.DataType.BFLOAT16:
            continue
        ends = () if limits else (-bound, bound)
        limits += [add_constant(graph, names("bf16_limit"), np.asarray(end, np.float32)) for end in ends]
        out = ir.Value(name=names(f"{value.name}_clipped"), shape=value.shape, type=value.type)
        clip = ir.Node("", "Clip", [value, *limits], outputs=[out], name=names(f"{node.name}_clip"))
        graph.insert_before(node, clip)
        node.replace_input_with(0, out)
        count += 1
    return f"inserted {count} Clip nodes"


_BIAS = 2  # the place of a layer's bias
_LIKEWISE = {
    "disable_shape_infer": "shapes are inferred where they are missing, since types depend on them",
    "not_simplify": "nothing is simplified",
    "all_tensors_to_one_file": "external data lie in one file",
}


def _to_fp16(model: ir.Model, keep_io_types: bool = False, **likewise: bool) -> tool.Rewritten:
    """float32 to float16, with the switches of the documents' tool; those that mean nothing here are told."""
    result, done = convert_fp32_to_fp16(model, keep_io_types)
    told = [f"--{name}: {_LIKEWISE[name]}" for name, given in likewise.items() if given]
    return result, "\n".join([done, *told])


_SWITCHES = tuple(tool.switch(name, words, f"--{name}") for name, words in _LIKEWISE.items())
_KEEP_IO = tool.switch("keep_io_types", "graph inputs and outputs stay float32", "--keep_io_types")
_FILES = (tool.SOURCE, tool.TARGET, tool.EXTERNAL)

FLOAT_TOOLS = (
    *(
        tool.from_file_to_file(f"convert_{name}_to_{form}", f"{what} in {words}.", work, parameters)
        for form, words, work, parameters in (
            ("bf16", "bfloat16", _to_bf16, (*_FILES, _FORMAT)),
            ("bfp16", "block floating point", _to_bfp16, _FILES),
        )
        for name, what in (("fp32", "A float32 model"), ("fp16", "A float16 model"))
    ),
    tool.rewriting(
        "A float32 model in float16.", _to_fp16, _KEEP_IO, *_SWITCHES, name="convert_fp32_to_fp16"
    ),
    _converting("convert_fp16_to_fp32", "A float16 model, or any short-float form, in float32.", to="fp32"),
    _converting("replace_bfloat16_qdq_cast", "bfloat16 pairs of AMD's operators as Cast pairs.", form="cast"),
    _converting(
        "remove_bf16_cast",
        "bfloat16 casts between nodes taken out; constants keep their rounding.",
        form="plain",
    ),
    tool.rewriting("A Clip before each bfloat16 activation.", insert_clip_bfloat16_qdq),
)


Shapes = Mapping[str, tuple[int, ...]]


@tool.on_copy
def convert_nchw_to_nhwc(model: ir.Model) -> str:
    """The graph takes and gives images with their channels last."""
    refresh_shapes(model)
    return f"turned {nchw_to_nhwc(model)} inputs and outputs"


@tool.on_copy
def fix_shapes(model: ir.Model, fix_shapes: Shapes | None = None) -> str:
    """Fixed shapes for inputs; without any, open dimensions become 1. Given outputs must come out so."""
    given = dict(fix_shapes or _ones(model))
    outputs = {str(v.name) for v in model.graph.outputs} - {str(v.name) for v in model.graph.inputs}
    count = fix_input_shapes(model, {name: sizes for name, sizes in given.items() if name not in outputs})
    for node in model.graph:  # shapes of inner tensors and outputs follow anew from the inputs
        for value in node.outputs:
            value.shape = None
    refresh_shapes(model)
    for value in model.graph.outputs:
        wanted, found = given.get(str(value.name)), static_shape(value)
        if wanted is not None and found is not None and wanted != found:
            raise RecipeError(
                f"Output '{value.name}' has another shape than the one given.",
                where="--fix_shapes",
                observed=list(found),
                expected=list(wanted),
            )
    return f"fixed {count} shapes"


def _ones(model: ir.Model) -> dict[str, tuple[int, ...]]:
    return {
        str(value.name): tuple(d if isinstance(d, int) and d > 0 else 1 for d in value.shape)
        for value in model.graph.inputs
        if value.shape is not None and static_shape(value) is None
    }


@tool.on_copy
def remove_initializer_from_input(model: ir.Model) -> str:
    """Weights are no longer listed as inputs."""
    before = len(model.graph.inputs)
    common.RemoveInitializersFromInputsPass()(model)
    return f"removed {before - len(model.graph.inputs)} initializers from the inputs"


@tool.on_copy
def convert_shared_initializer_to_unique(
    model: ir.Model, op_types: Iterable[str] = (), prefix: str = "", only_bias: bool = False
) -> str:
    """Each reader of a shared initializer gets a copy of its own.

    Args:
        model: any model.
        op_types: only readers of these types, if any are given.
        prefix: of the copies' names.
        only_bias: only where a layer reads it as its bias.
    """
    names, wanted, count = Names(model.graph), frozenset(op_types), 0
    for value in list(model.graph.initializers.values()):
        array = constant_array(value)
        uses = [use for use in value.uses() if not wanted or use.node.op_type in wanted]
        if only_bias:
            uses = [use for use in uses if use.idx == _BIAS and use.node.op_type in tool.LAYERS]
        keeps_one = len(uses) == len(value.uses()) and not value.is_graph_output()
        if array is None or len(value.uses()) < 2:
            continue
        name = f"{prefix}_{value.name}" if prefix else str(value.name)
        for use in uses[1:] if keeps_one else uses:
            use.node.replace_input_with(use.idx, add_constant(model.graph, names(name), array))
            count += 1
    return f"made {count} copies"


@tool.on_copy
def replace_inf_weights(model: ir.Model, replace_inf_value: float = 10000.0) -> str:
    """Infinite weights become a finite number of the same sign."""
    count = 0
    for value in model.graph.initializers.values():
        array = constant_array(value)
        if array is None or array.dtype.kind != "f" or not np.isinf(array).any():
            continue
        infinite = np.isinf(array)
        changed = np.where(infinite, np.sign(array) * replace_inf_value, array).astype(array.dtype)
        value.const_value = ir.tensor(changed, name=value.name)
        count += int(infinite.sum())
    return f"replaced {count} infinite values"


def convert_opset_version(model: ir.Model, target_opset: int) -> tool.Rewritten:
    """Another opset for the standard operators, up or down, where ONNX can convert every one of them."""
    before = opset_version(model)
    if before == target_opset:
        return model.clone(), f"the opset is {before} already"
    try:
        proto = onnx.version_converter.convert_version(ir.to_proto(model), target_opset)
    except (RuntimeError, onnx.version_converter.ConvertError) as error:
        raise ModelError(
            "ONNX cannot convert the model to that opset.",
            where=f"opset {before} to {target_opset}",
            observed=" ".join(str(error).split())[:300],
        ) from error
    return ir.from_proto(proto), f"opset {before} to {target_opset}"
