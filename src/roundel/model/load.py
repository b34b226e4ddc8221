"""From a path, a ModelProto or an onnx-ir model to one clean onnx-ir model, or a clear refusal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.shape_inference
import onnx.version_converter
import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]

from roundel.errors import ModelError, did_you_mean
from roundel.model import normalise
from roundel.model.files import external_values
from roundel.model.graph import op_key, opset_version
from roundel.model.structure import ModelSource as ModelSource
from roundel.model.structure import blaming, check_structure

OPSET = 17
# A node takes 16 kB of memory and half a millisecond; large language models have some ten thousand nodes.
_MOST_NODES = 250_000
_QUANTIZED_OPS = {
    "": "QuantizeLinear DequantizeLinear DynamicQuantizeLinear ConvInteger MatMulInteger QLinearConv"
    " QLinearMatMul",
    "com.microsoft": "QuantizeLinear DequantizeLinear MatMulNBits GatherBlockQuantized DynamicQuantizeMatMul"
    " MatMulIntegerToFloat QGemm QLinearAdd QLinearMul QLinearConcat DynamicQuantizeLSTM QAttention",
    "com.amd.quark": "ExtendedQuantizeLinear ExtendedDequantizeLinear BFPQuantizeDequantize"
    " MXQuantizeDequantize",
}
_SPARSE = onnx.AttributeProto.SPARSE_TENSOR
_BODIES = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
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

    @property
    def name(self) -> str:
        """Of its file, for people."""
        return self.path.name if self.path else "in memory"


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
    model = as_written(source)
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
    normalise.make_readable(model)
    _refuse_empty(model, where)
    check_structure(model, where)
    if not allow_quantized:
        _refuse_quantized(model, where)
    _check_external(model, where)
    # Before this version, every initializer had to be a graph input, too.
    model.ir_version = max(model.ir_version, 8) if model.ir_version < 4 else model.ir_version
    notes = normalise.normalise(model, where)
    source_opset = opset_version(model)
    if not allow_quantized:
        notes += normalise.raise_opset(model, OPSET)
        notes += normalise.widen_floats(model)
    normalise.declare_outputs(model)
    return notes, source_opset


def as_written(source: ModelSource) -> ir.Model:
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
            "The model is not valid.",
            where=where,
            observed=normalise.root_cause(error),
            expected="an ONNX model",
        ) from error


def _undecodable(where: object, head: bytes, error: Exception) -> ModelError:
    textual = bool(head) and all(32 <= b < 127 or b in b"\r\n\t" for b in head)
    cause = normalise.root_cause(error)
    seen = f"text that begins {head[:32].decode('ascii')!r}" if textual else cause
    return ModelError(
        "The file is not a readable ONNX model.",
        where=where,
        observed=seen[:300] if head else "an empty file",
        expected="an ONNX protobuf",
        hint="Check that the download or export finished; a Git LFS pointer or an HTML page is common.",
    )


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
        if node.op_type in _QUANTIZED_OPS.get(node.domain.removeprefix("ai.onnx"), "").split():
            return node
    return None


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
    short = normalise.bfloat16_node(model)
    if short is not None and not normalise.computes_in_bfloat16(model):
        raise ModelError(
            "The model is already in bfloat16.",
            where=where,
            observed=f"{op_key(short)} node '{short.name}'",
            expected="a float model",
            hint="Start from the float model, or take the casts out: roundel convert MODEL -o OUT --to fp32.",
        )


def _check_external(model: ir.Model, where: object) -> None:
    for value, tensor in external_values(model):
        place = f"{where}, initializer '{value.name}'"
        try:
            path = Path(tensor.path)
            size = path.stat().st_size
            if tensor.length is not None and tensor.length < tensor.nbytes:
                raise ModelError(
                    "A weight's external data are shorter than the weight.",
                    where=place,
                    observed=f"{path.name} gives it {tensor.length} bytes",
                    expected=f"{tensor.nbytes} bytes, for {tensor.dtype.name.lower()} {tensor.shape}",
                    hint="The file may be damaged: export or download the model again.",
                )
            needed = (tensor.offset or 0) + (tensor.length or tensor.nbytes)
            if size < needed:
                raise ModelError(
                    "A weight's external data file is too short.",
                    where=place,
                    observed=f"{path.name} has {size} bytes",
                    expected=f"at least {needed} bytes",
                    hint="Copy or download the data file again.",
                )
            tensor.numpy()  # maps the file, after onnx-ir has proved that it lies in the model's folder
        except (OSError, ValueError) as error:
            raise ModelError(
                "A weight's external data cannot be read.",
                where=place,
                observed=f"{tensor.location}: {getattr(error, 'strerror', None) or error}",
                expected="a file in the model's own folder, not a link to another one",
                hint="Copy the data file next to the model, under the name that the model gives it.",
            ) from error
