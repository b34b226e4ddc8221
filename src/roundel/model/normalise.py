"""What a file may hold, brought into the one form that the passes know; in place, and exact."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.shape_inference
import onnx.version_converter
import onnx_ir as ir
from onnx_ir.passes import common

from roundel.errors import ModelError
from roundel.model.edit import name_nodes
from roundel.model.files import DATA_MARK, self_contained
from roundel.model.graph import attribute_int, iter_values, opset_version
from roundel.model.session import open_session

_SHORT = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_FULL = ir.DataType.FLOAT


def widen_floats(model: ir.Model) -> list[str]:
    """Turn every 16-bit float tensor, attribute and graph input or output into float32, in place. Exact."""
    notes = []
    for short in _SHORT:
        changed = sum(_widen_graph(graph, short) for graph in model.graphs())
        if changed:
            notes.append(f"widened {changed} {short.name.lower()} tensors to float32")
    return notes


def _widen_graph(graph: ir.Graph, short: ir.DataType) -> int:
    changed = 0
    for value in graph.initializers.values():
        if value.const_value is not None and value.const_value.dtype is short:
            value.const_value = ir.tensor(value.const_value.numpy().astype(np.float32), name=value.name)
            value.dtype = _FULL
            changed += 1
    for value in (*iter_values(graph), *graph.outputs):
        if value.dtype is short:
            value.dtype = _FULL
            changed += 1
    return changed + sum(_widen_attributes(node, short) for node in graph)


def _widen_attributes(node: ir.Node, short: ir.DataType) -> int:
    changed = 0
    for name, attr in list(node.attributes.items()):
        if attr.type is ir.AttributeType.TENSOR and attr.as_tensor().dtype is short:
            array = attr.as_tensor().numpy().astype(np.float32)
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(array))
            changed += 1
        elif name in ("to", "dtype", "output_dtype") and attr.value == short.value:
            node.attributes[name] = ir.AttrInt64(name, _FULL.value)
            changed += 1
    return changed


_MINIMUM = 10  # QuantizeLinear appeared here
_REFUSALS = (
    RuntimeError,
    IndexError,  # onnx 1.17, for an operator that it does not know
    onnx.version_converter.ConvertError,
    onnx.checker.ValidationError,
    onnx.shape_inference.InferenceError,
)
_RESIZE_CHANGED = 11  # the opset from which on Resize centres its pixels, unless told otherwise
_PLACE = "coordinate_transformation_mode"
_ASIDE = "roundel.set_aside"
_SMALL = 4096  # the converter reads small constants (axes, sizes); larger tensors it only carries along


def raise_opset(model: ir.Model, target: int) -> list[str]:
    """Convert the default domain to `target` when it is older. Edits the model in place.

    When ONNX's converter does not know an operator, the model keeps its opset, provided that Q/DQ
    nodes exist there.
    """
    current = opset_version(model)
    if current == 0 or current >= target:
        return []
    try:
        converted = _convert(model, target)
    except _REFUSALS as error:
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        if current < _MINIMUM:
            raise ModelError(
                "The model's opset is too old and ONNX cannot convert it.",
                where=f"opset {current}",
                observed=reason,
                expected=f"opset {target} (at least {_MINIMUM})",
                hint="Export the model again at opset 17.",
            ) from error
        return [f"kept opset {current}: the ONNX converter refused ({reason})"]
    if current < _RESIZE_CHANGED:
        _keep_sampling(converted.graph)
    name_nodes(converted.graph)  # the converter's own nodes have none
    model.graph = converted.graph
    model.ir_version = max(model.ir_version or 0, converted.ir_version or 0)
    return [f"raised the opset from {current} to {target}"]


def _keep_sampling(graph: ir.Graph) -> None:
    """Say which pixels Upsample and the first Resize took; the converter leaves what Resize takes today."""
    for node in graph.all_nodes():
        if node.op_type == "Resize" and not node.domain:
            node.attributes.setdefault(_PLACE, ir.AttrString(_PLACE, "asymmetric"))
            node.attributes.setdefault("nearest_mode", ir.AttrString("nearest_mode", "floor"))


def _convert(model: ir.Model, target: int) -> ir.Model:
    """Run the C++ converter on a copy whose large weights are plain inputs, then put them back."""
    slim = self_contained(model.clone())
    weights: dict[str, ir.TensorProtocol] = {}
    original_inputs = len(slim.graph.inputs)
    for name, value in list(slim.graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or tensor.nbytes <= _SMALL:
            continue
        weights[name] = tensor
        value.shape, value.dtype = ir.Shape(tensor.shape.numpy()), tensor.dtype
        value.const_value = None
        del slim.graph.initializers[name]
        slim.graph.inputs.append(value)
    version = opset_version(model)
    for node in slim.graph.all_nodes():
        # ONNX Runtime knows some before ONNX does: LayerNormalization below opset 17.
        if not node.domain and not onnx.defs.has(node.op_type, version, ""):
            node.domain = _ASIDE
            slim.opset_imports[_ASIDE] = 1
    result = ir.from_proto(onnx.version_converter.convert_version(ir.to_proto(slim), target))
    for node in result.graph.all_nodes():
        if node.domain == _ASIDE:
            node.domain = ""
    result.opset_imports.pop(_ASIDE, None)
    while len(result.graph.inputs) > original_inputs:
        # One by one: deleting a slice leaves the values believing that they are still inputs.
        value = result.graph.inputs.pop()
        value.const_value = weights[str(value.name)]
        result.graph.initializers[str(value.name)] = value
    return result


_EXPORT_NOTES = ("pkg.torch.", "pkg.onnxscript.", "namespace")


def declare_outputs(model: ir.Model) -> None:
    """Types and shapes of outputs that declare none, as ONNX Runtime infers them.

    ONNX's checker refuses a file without them, and ONNX's inference knows no operator of another domain.
    """
    open_outputs = {v.name: v for v in model.graph.outputs if v.type is None or v.shape is None}
    if not open_outputs:
        return
    try:
        session = open_session(model, optimise=False)
    except ModelError:
        return  # whoever needs a session next says what is wrong
    for seen in session.get_outputs():
        value, kind = open_outputs.get(seen.name), seen.type.removeprefix("tensor(").removesuffix(")")
        if value is None or seen.type != f"tensor({kind})":
            continue
        value.dtype = ir.DataType[kind.upper()]
        if value.shape is None and seen.shape:  # an empty list stands for an unknown rank, too
            value.shape = ir.Shape(seen.shape)


def make_readable(model: ir.Model) -> None:
    """Titles and comments that are not UTF-8, which protobuf reads and does not write, with marks instead."""
    holders: list[Any] = [model, *model.graphs(), *model.graph.all_nodes()]
    for holder in holders:
        titles = (
            () if isinstance(holder, ir.Node) else ("name", "producer_name", "producer_version", "domain")
        )
        for field in (*titles, "doc_string"):
            text = getattr(holder, field, None)
            if isinstance(text, bytes):
                setattr(holder, field, text.decode("utf-8", "replace"))
        for key, text in list(holder.metadata_props.items()):
            if isinstance(key, bytes) or isinstance(text, bytes):
                del holder.metadata_props[key]


def root_cause(error: BaseException) -> str:
    """onnx-ir wraps an error once for each level of the graph; the innermost one names the fault."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def bfloat16_node(model: ir.Model) -> ir.Node | None:
    """A node that makes or reads bfloat16, or None."""
    return next((node for _, node in _bfloat16_uses(model) if node is not None), None)


def computes_in_bfloat16(model: ir.Model) -> bool:
    """Whether the model is one of bfloat16 itself; one that was converted only casts there and back."""
    return any(node is None or node.op_type != "Cast" for _, node in _bfloat16_uses(model))


def _bfloat16_uses(model: ir.Model) -> Iterator[tuple[ir.Value, ir.Node | None]]:
    """Each bfloat16 value with each of its readers, and with its maker; None for the model's caller."""
    short = ir.DataType.BFLOAT16
    for graph in model.graphs():
        for value in iter_values(graph):
            maker = value.producer()
            cast = maker is not None and maker.op_type == "Cast" and attribute_int(maker, "to", 0) == short
            if not cast and value.dtype is not short:
                continue
            if maker is not None or value.is_graph_input():
                yield value, maker
            if value.is_graph_output():
                yield value, None
            for use in value.uses():
                yield value, use.node


def normalise(model: ir.Model, where: object) -> list[str]:
    """No functions, no initializers among the inputs, nodes in order and with names; what was done."""
    notes = []
    if model.functions:
        try:
            common.InlinePass()(model)
        except (ir.passes.InvariantError, ir.passes.PassError, ValueError) as error:
            raise ModelError(
                "The model's own functions cannot be put in place of their calls.",
                where=where,
                observed=root_cause(error),
                expected="functions that do not call themselves, with as many inputs as they declare",
            ) from error
        notes.append("inlined model-local functions")
    if any(v.name in model.graph.initializers for v in model.graph.inputs):
        common.RemoveInitializersFromInputsPass()(model)
        notes.append("removed initializers from the graph inputs")
    try:
        model.graph.sort()
    except ValueError as error:
        raise ModelError(
            "The graph has a cycle.", where=where, observed=error, expected="an acyclic graph"
        ) from error
    _forget_export(model)
    named = name_nodes(model.graph)
    if named:
        notes.append(f"named {named} unnamed node(s)")
    return notes


def _forget_export(model: ir.Model) -> None:
    """Drop what torch's exporter noted for debugging: source lines and paths of the exporting machine.

    And what Roundel noted of the source's own data file.
    """
    model.metadata_props.pop(DATA_MARK, None)
    for node in model.graph.all_nodes():
        for notes in (node.metadata_props, *(value.metadata_props for value in node.outputs)):
            for key in [key for key in notes if key.startswith(_EXPORT_NOTES)]:
                del notes[key]
