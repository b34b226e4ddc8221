"""Utilities for any graph: shapes, layout, opset, shared and infinite weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from roundel.errors import ModelError, RecipeError
from roundel.model.graph import constant_array, opset_version, static_shape
from roundel.passes import refresh_shapes
from roundel.passes.operators import nchw_to_nhwc
from roundel.passes.shapes import fix_input_shapes
from roundel.qdq.names import Names
from roundel.qdq.nodes import add_constant
from roundel.quark.tools.tool import Rewritten, on_copy

Shapes = Mapping[str, tuple[int, ...]]


@on_copy
def convert_nchw_to_nhwc(model: ir.Model) -> str:
    """The graph takes and gives images with their channels last."""
    refresh_shapes(model)
    count = nchw_to_nhwc(model)
    return f"turned {count} inputs and outputs"


@on_copy
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
    found = {}
    for value in model.graph.inputs:
        if value.shape is not None and static_shape(value) is None:
            found[str(value.name)] = tuple(d if isinstance(d, int) and d > 0 else 1 for d in value.shape)
    return found


@on_copy
def remove_initializer_from_input(model: ir.Model) -> str:
    """Weights are no longer listed as inputs."""
    before = len(model.graph.inputs)
    common.RemoveInitializersFromInputsPass()(model)
    return f"removed {before - len(model.graph.inputs)} initializers from the inputs"


@on_copy
def convert_shared_initializer_to_unique(model: ir.Model, op_types: Iterable[str] = ()) -> str:
    """Each reader of a shared initializer gets a copy of its own; only those of the given types, if any."""
    names, wanted, count = Names(model.graph), frozenset(op_types), 0
    for value in list(model.graph.initializers.values()):
        array = constant_array(value)
        uses = [use for use in value.uses() if not wanted or use.node.op_type in wanted]
        keeps_one = len(uses) == len(value.uses()) and not value.is_graph_output()
        if array is None or len(value.uses()) < 2:
            continue
        for use in uses[1:] if keeps_one else uses:
            use.node.replace_input_with(use.idx, add_constant(model.graph, names(str(value.name)), array))
            count += 1
    return f"made {count} copies"


@on_copy
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


def convert_opset_version(model: ir.Model, target_opset: int) -> Rewritten:
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
