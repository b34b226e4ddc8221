"""Raise the opset, keeping big weights out of the converter's way."""

from __future__ import annotations

import onnx
import onnx.shape_inference
import onnx.version_converter
import onnx_ir as ir

from roundel.errors import ModelError
from roundel.model.external import self_contained
from roundel.model.graph import opset_version
from roundel.model.names import name_nodes

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
