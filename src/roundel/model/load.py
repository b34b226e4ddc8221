"""From a path, a ModelProto or an onnx-ir model to one clean onnx-ir model, or a clear refusal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.shape_inference
import onnx.version_converter
import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]
from onnx_ir.passes import common

from roundel.errors import ModelError, did_you_mean
from roundel.model.edit import name_nodes
from roundel.model.files import DATA_MARK, external_values, self_contained
from roundel.model.graph import attribute_int, iter_values, op_key, opset_version
from roundel.model.session import open_session
from roundel.model.structure import ModelSource as ModelSource
from roundel.model.structure import blaming, check_structure

_SHORT = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_FULL = ir.DataType.FLOAT


def widen_floats(model: ir.Model) -> list[str]:
    """Turn every 16-bit float tensor, attribute and graph input or output into float32, in place. Exact."""
    notes = []
    for short in _SHORT:
        changed = sum(_widen_graph(graph, short) for graph in _graphs(model))
        if changed:
            notes.append(f"widened {changed} {short.name.lower()} tensors to float32")
    return notes


def _graphs(model: ir.Model) -> list[ir.Graph]:
    return [model.graph, *(g for g in model.graph.subgraphs() if isinstance(g, ir.Graph))]


def _widen_graph(graph: ir.Graph, short: ir.DataType) -> int:
    changed = 0
    for value in graph.initializers.values():
        if value.const_value is not None and value.const_value.dtype is short:
            array = value.const_value.numpy().astype(np.float32)
            value.const_value = ir.tensor(array, name=value.name)
            value.dtype = _FULL
            changed += 1
    for value in (*graph.inputs, *graph.outputs):
        changed += _widen_value(value, short)
    for node in graph:
        for value in node.outputs:
            changed += _widen_value(value, short)
        changed += _widen_attributes(node, short)
    return changed


def _widen_value(value: ir.Value, short: ir.DataType) -> int:
    if value.dtype is not short:
        return 0
    value.dtype = _FULL
    return 1


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


OPSET = 17
# A node takes 16 kB of memory and half a millisecond; large language models have some ten thousand nodes.
_MOST_NODES = 250_000

_QUANTIZED_OPS = {
    "": {
        "QuantizeLinear",
        "DequantizeLinear",
        "DynamicQuantizeLinear",
        "ConvInteger",
        "MatMulInteger",
        "QLinearConv",
        "QLinearMatMul",
    },
    "com.microsoft": {
        "QuantizeLinear",
        "DequantizeLinear",
        "MatMulNBits",
        "GatherBlockQuantized",
        "DynamicQuantizeMatMul",
        "MatMulIntegerToFloat",
        "QGemm",
        "QLinearAdd",
        "QLinearMul",
        "QLinearConcat",
        "DynamicQuantizeLSTM",
        "QAttention",
    },
    "com.amd.quark": {
        "ExtendedQuantizeLinear",
        "ExtendedDequantizeLinear",
        "BFPQuantizeDequantize",
        "MXQuantizeDequantize",
    },
}

_SPARSE = onnx.AttributeProto.SPARSE_TENSOR
_BODIES = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
_EXPORT_NOTES = ("pkg.torch.", "pkg.onnxscript.", "namespace")

# What protobuf and onnx-ir raise for content that is no model.
_UNREADABLE = (DecodeError, ir.serde.SerdeError, ValueError, TypeError, KeyError, AttributeError)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready for the passes, and what loading did to it.

    Attributes:
        data_files: where the source's weights lie, as far as they have files of their own.
    """

    model: ir.Model
    path: Path | None
    file_bytes: int | None
    source_opset: int
    notes: tuple[str, ...]
    data_files: tuple[Path, ...] = ()


def load_model(
    source: ModelSource, *, allow_quantized: bool = False, opaque: str | None = None
) -> LoadedModel:
    """Read and normalise a model. The source itself is never changed.

    Args:
        source: a file, serialised bytes, a ModelProto, or an onnx-ir model.
        allow_quantized: accept a model that holds Q/DQ nodes (inspection of finished models).
        opaque: a domain whose functions are dropped instead of inlined: its operators stay nodes.
    """
    path = Path(source) if isinstance(source, str | Path) else None
    model = read_model(source)
    data_files = tuple(dict.fromkeys(Path(tensor.path) for _, tensor in external_values(model)))
    with blaming(source):
        notes, source_opset = _cleaned(model, path or "the model passed in", opaque, allow_quantized)
    size = path.stat().st_size if path else None
    return LoadedModel(model, path, size, source_opset, tuple(notes), data_files)


def _cleaned(
    model: ir.Model, where: object, opaque: str | None, allow_quantized: bool
) -> tuple[list[str], int]:
    """Check and normalise a model in place; what was done, and the opset that it came with."""
    for key in [key for key in model.functions if key[0] == opaque]:
        del model.functions[key]
    _make_readable(model)
    _refuse_empty(model, where)
    check_structure(model, where)
    if not allow_quantized:
        _refuse_quantized(model, where)
    _check_external(model, where)
    # Before this version, every initializer had to be a graph input, too.
    model.ir_version = max(model.ir_version, 8) if model.ir_version < 4 else model.ir_version
    notes = _normalise(model, where)
    source_opset = opset_version(model)
    if not allow_quantized:
        notes += raise_opset(model, OPSET)
        notes += widen_floats(model)
    _declare_outputs(model)
    return notes, source_opset


def _declare_outputs(model: ir.Model) -> None:
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


def _make_readable(model: ir.Model) -> None:
    """Titles and comments that are not UTF-8, which protobuf reads and does not write, with marks instead."""
    holders: list[Any] = [model, model.graph, *model.graph.subgraphs(), *model.graph.all_nodes()]
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


def read_model(source: ModelSource) -> ir.Model:
    """The model as it is written, but with sparse tensors written out; the source stays as it was."""
    if isinstance(source, ir.Model):
        return source.clone()
    if isinstance(source, onnx.ModelProto):
        return _converted(source, "the ModelProto passed in")
    if isinstance(source, bytes):
        return _decode(source)
    path = Path(source)
    try:
        if not path.exists():
            raise _missing(path)
        if path.is_dir():
            raise ModelError("The model path is a folder.", where=path, expected="an .onnx file")
        return _from_proto(onnx.load(path, load_external_data=False, format="protobuf"), path.parent, path)
    except _UNREADABLE as error:
        with path.open("rb") as file:
            raise _undecodable(path, file.read(64), error) from error
    except OSError as error:
        raise ModelError("The model cannot be read.", where=path, observed=error) from error


def _from_proto(proto: onnx.ModelProto, folder: Path, where: object) -> ir.Model:
    """The model, whose external data must lie in the folder.

    onnx-ir proves that they do, but only where it is told a folder: with the empty name, as of a model in the
    current directory, or of one that came as bytes, `../secret` would be read.
    """
    for graph in _graph_protos(proto.graph):
        _check_references(graph, where)
        _write_out_sparse(graph, where)
    model: ir.Model = ir.from_proto(proto)
    ir.external_data.set_base_dir(model.graph, folder.absolute())
    return model


def _graph_protos(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs) if attribute.type in _BODIES else ():
                yield from _graph_protos(body)


def _check_references(graph: onnx.GraphProto, where: object) -> None:
    """What external data say of their place must be numbers that a file can have."""
    for tensor in graph.initializer:
        said = {entry.key: entry.value for entry in tensor.external_data}
        for key in said.keys() & {"offset", "length"}:
            if not said[key].isdecimal():
                raise ModelError(
                    "A weight's external data have no place in their file.",
                    where=f"{where}, initializer '{tensor.name}'",
                    observed=f"{said.get('location')}: {key} {said[key]} bytes",
                    expected="0 bytes or more",
                    hint="The file may be damaged: export or download the model again.",
                )


def _is_sparse(proto: onnx.ModelProto) -> bool:
    return any(
        graph.sparse_initializer or any(a.type == _SPARSE for node in graph.node for a in node.attribute)
        for graph in _graph_protos(proto.graph)
    )


def _write_out_sparse(graph: onnx.GraphProto, where: object) -> None:
    """Sparse initializers and constants as dense ones, in place; onnx-ir loses the former."""
    graph.initializer.extend(_dense(tensor, where) for tensor in graph.sparse_initializer)
    del graph.sparse_initializer[:]
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == _SPARSE and node.op_type == "Constant":
                dense = _dense(attribute.sparse_tensor, f"{where}, node '{node.name}'")
                attribute.CopyFrom(onnx.helper.make_attribute("value", dense))


_MOST_DENSE = 1 << 30  # elements; a sparse tensor of a few bytes can claim any size


def _dense(sparse: onnx.SparseTensorProto, where: object) -> onnx.TensorProto:
    """A sparse tensor as what it stands for: runtimes for NPUs know no other form."""
    name, shape = sparse.values.name, tuple(sparse.dims)
    place = f"{where}, sparse tensor '{name}'"
    size = math.prod(shape)
    if min(shape, default=1) < 0 or size > _MOST_DENSE:
        raise ModelError(
            "A sparse tensor is too large to be written out.",
            where=place,
            observed=f"shape {list(shape)}",
            expected=f"at most {_MOST_DENSE} elements",
        )
    try:
        if onnx.TensorProto.EXTERNAL in (sparse.values.data_location, sparse.indices.data_location):
            raise ValueError("its numbers lie in another file")
        values, indices = (onnx.numpy_helper.to_array(part) for part in (sparse.values, sparse.indices))
        places = indices.T if indices.ndim == 2 else np.unravel_index(indices, shape)
        dense = np.zeros(shape, values.dtype)
        if indices.size and indices.min() < 0:
            raise ValueError(f"index {indices.min()}")
        dense[tuple(places)] = values
    except (ValueError, IndexError, TypeError) as error:
        raise ModelError(
            "A sparse tensor contradicts itself.",
            where=place,
            observed=error,
            expected=f"values, and as many indices inside shape {list(shape)}, in the model's own file",
            hint="Export the model with dense weights.",
        ) from error
    return onnx.numpy_helper.from_array(dense, name)


def _decode(data: bytes) -> ir.Model:
    try:
        return _from_proto(onnx.load_from_string(data), Path(), "the bytes passed in")
    except _UNREADABLE as error:
        raise _undecodable("the bytes passed in", data[:64], error) from error


def _converted(proto: onnx.ModelProto, where: str) -> ir.Model:
    try:
        if _is_sparse(proto):
            given, proto = proto, onnx.ModelProto()
            proto.CopyFrom(given)
        return _from_proto(proto, Path(), where)
    except _UNREADABLE as error:
        raise ModelError(
            "The model is not valid.", where=where, observed=_root_cause(error), expected="an ONNX model"
        ) from error


def _undecodable(where: object, head: bytes, error: Exception) -> ModelError:
    textual = bool(head) and all(32 <= b < 127 or b in b"\r\n\t" for b in head)
    cause = _root_cause(error)
    seen = f"text that begins {head[:32].decode('ascii')!r}" if textual else cause
    return ModelError(
        "The file is not a readable ONNX model.",
        where=where,
        observed=seen[:300] if head else "an empty file",
        expected="an ONNX protobuf",
        hint="Check that the download or export finished; a Git LFS pointer or an HTML page is common.",
    )


def _root_cause(error: BaseException) -> str:
    """onnx-ir wraps an error once for each level of the graph; the innermost one names the fault."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _missing(path: Path) -> ModelError:
    folder = path.parent
    names = [p.name for p in folder.iterdir() if p.suffix == ".onnx"] if folder.is_dir() else []
    return ModelError(
        "The model file does not exist.",
        where=path,
        hint=did_you_mean(path.name, names) or "Check the path.",
    )


def _refuse_empty(model: ir.Model, where: object) -> None:
    if not model.graph.opset_imports:
        raise ModelError(
            "The file is not a valid ONNX model.",
            where=where,
            observed="no opset import",
            hint="Check that the download or export finished.",
        )
    if len(model.graph) == 0:
        raise ModelError("The model has no nodes: there is nothing to quantize.", where=where)
    if len(model.graph) > _MOST_NODES:
        raise ModelError(
            "The model has more nodes than can be handled in reasonable time and memory.",
            where=where,
            observed=f"{len(model.graph)} nodes",
            expected=f"at most {_MOST_NODES}",
        )


def quantized_node(model: ir.Model) -> ir.Node | None:
    """A node that only quantized models have, or None."""
    for node in model.graph.all_nodes():
        if node.op_type in _QUANTIZED_OPS.get(node.domain.removeprefix("ai.onnx"), ()):
            return node
    return None


def bfloat16_node(model: ir.Model) -> ir.Node | None:
    """A node that makes or reads bfloat16, or None."""
    return next((node for _, node in _bfloat16_uses(model) if node is not None), None)


def computes_in_bfloat16(model: ir.Model) -> bool:
    """Whether the model is one of bfloat16 itself; one that was converted only casts there and back."""
    return any(node is None or node.op_type != "Cast" for _, node in _bfloat16_uses(model))


def _bfloat16_uses(model: ir.Model) -> Iterator[tuple[ir.Value, ir.Node | None]]:
    """Each bfloat16 value with each of its readers, and with its maker; None for the model's caller."""
    short = ir.DataType.BFLOAT16
    for graph in _graphs(model):
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


def _refuse_quantized(model: ir.Model, where: object) -> None:
    node = quantized_node(model)
    if node is not None:
        raise ModelError(
            "The model is already quantized.",
            where=where,
            observed=f"{op_key(node)} node '{node.name}'",
            expected="a float model",
            hint="Start from the float model that this one was made from.",
        )
    short = bfloat16_node(model)
    if short is not None and not computes_in_bfloat16(model):
        raise ModelError(
            "The model is already in bfloat16.",
            where=where,
            observed=f"{op_key(short)} node '{short.name}'",
            expected="a float model",
            hint="Start from the float model, or take the casts out: roundel convert MODEL -o OUT --to fp32.",
        )


def _check_external(model: ir.Model, where: object) -> None:
    for value, tensor in external_values(model):
        try:
            path = Path(tensor.path)
            size = path.stat().st_size
        except (OSError, ValueError) as error:
            raise _unreadable_data(value, tensor, where, error) from error
        if tensor.length is not None and tensor.length < tensor.nbytes:
            raise ModelError(
                "A weight's external data are shorter than the weight.",
                where=f"{where}, initializer '{value.name}'",
                observed=f"{path.name} gives it {tensor.length} bytes",
                expected=f"{tensor.nbytes} bytes, for {tensor.dtype.name.lower()} {tensor.shape}",
                hint="The file may be damaged: export or download the model again.",
            )
        needed = (tensor.offset or 0) + (tensor.length or tensor.nbytes)
        if size < needed:
            raise ModelError(
                "A weight's external data file is too short.",
                where=f"{where}, initializer '{value.name}'",
                observed=f"{path.name} has {size} bytes",
                expected=f"at least {needed} bytes",
                hint="Copy or download the data file again.",
            )
        try:
            tensor.numpy()  # maps the file, after onnx-ir has proved that it lies in the model's folder
        except (OSError, ValueError) as error:
            raise _unreadable_data(value, tensor, where, error) from error


def _unreadable_data(
    value: ir.Value, tensor: ir.ExternalTensor, where: object, error: Exception
) -> ModelError:
    return ModelError(
        "A weight's external data cannot be read.",
        where=f"{where}, initializer '{value.name}'",
        observed=f"{tensor.location}: {getattr(error, 'strerror', None) or error}",
        expected="a file in the model's own folder, not a link to another one",
        hint="Copy the data file next to the model, under the name that the model gives it.",
    )


def _normalise(model: ir.Model, where: object) -> list[str]:
    notes = []
    if model.functions:
        _inline(model, where)
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


def _inline(model: ir.Model, where: object) -> None:
    try:
        common.InlinePass()(model)
    except (ir.passes.InvariantError, ir.passes.PassError, ValueError) as error:
        raise ModelError(
            "The model's own functions cannot be put in place of their calls.",
            where=where,
            observed=_root_cause(error),
            expected="functions that do not call themselves, with as many inputs as they declare",
        ) from error


def _forget_export(model: ir.Model) -> None:
    """Drop what torch's exporter noted for debugging: source lines and paths of the exporting machine.

    And what Roundel noted of the source's own data file.
    """
    model.metadata_props.pop(DATA_MARK, None)
    for node in model.graph.all_nodes():
        for notes in (node.metadata_props, *(value.metadata_props for value in node.outputs)):
            for key in [key for key in notes if key.startswith(_EXPORT_NOTES)]:
                del notes[key]
