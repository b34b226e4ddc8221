"""ONNX Runtime sessions. The only place that builds one, so that every room runs models alike."""

from __future__ import annotations

import tempfile
import weakref
from pathlib import Path

import onnx_ir as ir
import onnxruntime as ort

from roundel.model.graph import weight_bytes

# Protobuf stops at 2 GiB; graph structure needs room next to the weights.
_IN_MEMORY_LIMIT = 1_500_000_000


def open_session(
    model: ir.Model | bytes | Path, *, threads: int | None = None, simulate: bool = False
) -> ort.InferenceSession:
    """A CPU session.

    Args:
        model: an onnx-ir model, serialised bytes, or a file.
        threads: intra-op threads; None leaves the choice to ONNX Runtime.
        simulate: compute Q/DQ models in float32 exactly as written, instead of letting ONNX Runtime
            fuse them into integer kernels whose results differ between CPUs.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if threads is not None:
        options.intra_op_num_threads = threads
    if simulate:
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    if isinstance(model, ir.Model):
        return _from_ir(model, options)
    source = model if isinstance(model, bytes) else str(model)
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def _from_ir(model: ir.Model, options: ort.SessionOptions) -> ort.InferenceSession:
    if weight_bytes(model) < _IN_MEMORY_LIMIT:
        data = ir.to_proto(model).SerializeToString()
        return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    folder = tempfile.TemporaryDirectory(prefix="roundel-")
    path = Path(folder.name) / "model.onnx"
    ir.save(model, path, external_data="model.data")
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    # The session may map the weights: the folder lives exactly as long as the session does.
    weakref.finalize(session, folder.cleanup)
    return session
