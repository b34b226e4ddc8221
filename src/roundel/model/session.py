"""ONNX Runtime sessions. The only place that builds one, so that every room runs models alike."""

from __future__ import annotations

import tempfile
import weakref
from pathlib import Path

import onnx_ir as ir
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from roundel.errors import ModelError
from roundel.model.external import self_contained
from roundel.model.graph import weight_bytes

# Protobuf stops at 2 GiB; graph structure needs room next to the weights.
_IN_MEMORY_LIMIT = 1_500_000_000
# ONNX Runtime's exceptions share no base class.
_REFUSALS = (
    ort_state.Fail,
    ort_state.InvalidArgument,
    ort_state.InvalidGraph,
    ort_state.InvalidProtobuf,
    ort_state.NoModel,
    ort_state.NoSuchFile,
    ort_state.NotImplemented,
    ort_state.RuntimeException,
    RuntimeError,
    ValueError,
)


def open_session(
    model: ir.Model | bytes | Path, *, threads: int | None = None, simulate: bool = False
) -> ort.InferenceSession:
    """A CPU session.

    Args:
        model: an onnx-ir model, serialised bytes, or a file.
        threads: intra-op threads; None leaves the choice to ONNX Runtime.
        simulate: compute Q/DQ models in float32 exactly as written, instead of letting ONNX Runtime
            fuse them into integer kernels whose results differ between CPUs.

    Raises:
        ModelError: ONNX Runtime does not load the model.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if threads is not None:
        options.intra_op_num_threads = threads
    if simulate:
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    if isinstance(model, ir.Model):
        return _from_ir(model, options)
    return _open(model if isinstance(model, bytes) else str(model), options)


def _open(source: str | bytes, options: ort.SessionOptions) -> ort.InferenceSession:
    try:
        return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except _REFUSALS as error:
        raise ModelError(
            "ONNX Runtime does not load the model.",
            where=source if isinstance(source, str) else None,
            observed=" ".join(str(error).split())[:400],
            hint="Check the model with onnx.checker.check_model; an unknown operator or a type is usual.",
        ) from error


def _from_ir(model: ir.Model, options: ort.SessionOptions) -> ort.InferenceSession:
    if weight_bytes(model) < _IN_MEMORY_LIMIT:
        return _open(ir.to_proto(self_contained(model)).SerializeToString(), options)
    folder = tempfile.TemporaryDirectory(prefix="roundel-")
    path = Path(folder.name) / "model.onnx"
    ir.save(self_contained(model), path, external_data="model.data")
    session = _open(str(path), options)
    # The session may map the weights: the folder lives exactly as long as the session does.
    weakref.finalize(session, folder.cleanup)
    return session
