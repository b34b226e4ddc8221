"""ONNX Runtime sessions. The only place that builds one, so that every room runs models alike."""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from roundel.errors import DependencyError, ModelError
from roundel.model.files import external_values, self_contained, weights_apart
from roundel.model.graph import weight_bytes
from roundel.model.memory import Outline, budget, footprint, outline_of
from roundel.work.executors import in_turn, usable_cores

PROVIDER = "CUDAExecutionProvider"


def runtime_has_cuda() -> bool:
    """Whether this ONNX Runtime was built with its CUDA provider."""
    return PROVIDER in ort.get_available_providers()


def move_to_cuda(session: ort.InferenceSession, device: int) -> None:
    """Move a session to a GPU; what has no kernel there stays on the CPU.

    Products are computed in float32, not in the shorter TF32 that CUDA prefers: ranges come from them.

    Raises:
        DependencyError: ONNX Runtime went on with the CPU, as it does where CUDA's libraries are missing.
    """
    options = {"device_id": str(device), "use_tf32": "0"}
    session.set_providers([PROVIDER, "CPUExecutionProvider"], [options, {}])
    if PROVIDER not in session.get_providers():
        raise DependencyError(
            "ONNX Runtime could not use the GPU.",
            where=f"cuda:{device}",
            observed=f"a session on {', '.join(session.get_providers())}",
            expected="the libraries of CUDA and cuDNN that this onnxruntime-gpu was built for",
            hint="pip install 'onnxruntime-gpu[cuda,cudnn]', or run with --device-exec cpu.",
        )


_WORTH_TRIMMING = 16_000_000  # bytes of weights
_WORTH_LENDING = 1024  # bytes; small constants (axes, shapes) are read while the graph is optimised
_LENDABLE = {"FLOAT", "DOUBLE", "FLOAT16", "INT8", "UINT8", "INT16", "UINT16", "INT32", "INT64"}
_MANY_NODES = 8000
_MMAP_THRESHOLD = -3  # of mallopt
# Where ONNX Runtime looks for the weights of a model that it gets as bytes.
_DATA_FOLDER = "session.model_external_initializers_file_folder_path"
# The first drops a Clip whose bounds a quantizer nearly, but not exactly, enforces; the second puts the zeros
# of a Pad into a MaxPool, which pads with minus infinity.
_INEXACT = ["ClipQuantRewrite", "Pad_Fusion"]
# ONNX Runtime's exceptions share no base class.
_OWN = "Fail InvalidArgument InvalidGraph InvalidProtobuf NoModel NoSuchFile NotImplemented RuntimeException"
_REFUSALS = (*(getattr(ort_state, name) for name in _OWN.split()), RuntimeError, ValueError)


# Where ONNX Runtime was imported before Roundel could keep it from reporting (see roundel/__init__.py).
if os.environ.get("ORT_DISABLE_TELEMETRY") == "1":
    ort.disable_telemetry_events()


_MOST_LANES = 4
_WITH_QUANTIZERS = 3  # times what the float model needs at once
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Lanes:
    """Samples that run side by side, each on its share of the cores.

    Two samples on a core each take half the time of one after the other on both: nothing waits at the end
    of each operator.

    Attributes:
        count: samples at once.
        threads: of each.
    """

    count: int
    threads: int

    @staticmethod
    def of(model: ir.Model, samples: int) -> Lanes:
        """As many as there are cores, samples, and room in memory for."""
        room = int(budget().live // (_WITH_QUANTIZERS * max(1, footprint(model).peak)))
        count = max(1, min(usable_cores(), samples, room, _MOST_LANES))
        return Lanes(count, max(1, usable_cores() // count))

    def each(self, work: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
        """The results, in order; no more of them wait than there are lanes, for they may be large."""
        if self.count == 1:
            yield from map(work, items)
            return
        with ThreadPoolExecutor(self.count) as pool:
            yield from in_turn(pool, work, items, self.count)


ONE_LANE = Lanes(1, 1)


def elements(value: ir.Value) -> int:
    """As far as the shape is known: open dimensions count as one."""
    shape = value.shape
    return 0 if shape is None else math.prod(dim if isinstance(dim, int) else 1 for dim in shape)


def open_session(
    model: ir.Model | bytes | Path,
    *,
    threads: int | None = None,
    simulate: bool = False,
    optimise: bool = True,
    device: int | None = None,
) -> ort.InferenceSession:
    """A session, on the CPU unless said otherwise.

    Args:
        model: an onnx-ir model, serialised bytes, or a file.
        threads: intra-op threads; None leaves the choice to ONNX Runtime.
        simulate: compute Q/DQ models in float32 exactly as written, instead of letting ONNX Runtime
            fuse them into integer kernels whose results differ between CPUs.
        optimise: let ONNX Runtime rewrite the graph.
        device: the number of a GPU, or None for the CPU.

    Raises:
        ModelError: ONNX Runtime does not load the model.
        DependencyError: ONNX Runtime cannot use the GPU.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4
    # The arena grows by doubling and keeps what it has; plain allocation peaks lower and was no slower.
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    if threads is not None:
        options.intra_op_num_threads = threads
    seen = _outline(model)
    # Stored codes would be unfolded to float32 before the first run.
    lean = seen.weight_bytes * (4 if simulate else 1) > budget().lean
    if lean:
        _keep_weights_in_place(options)
    if not optimise or (simulate and seen.nodes > _MANY_NODES):
        # The time to optimise grows faster than the graph, and each node computes as written anyway.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if simulate:
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        # Function bodies make thousands of tensors. The time to plan which of them share memory grows with
        # the square of their number: seconds, where freeing them early does as well.
        options.enable_mem_reuse = not seen.functions
    if isinstance(model, ir.Model):
        session = _from_ir(model, options, lean=lean)
    else:
        session = _open(model if isinstance(model, bytes) else str(model), options)
    if seen.weight_bytes > _WORTH_TRIMMING:
        give_memory_back()
    if device is not None:
        move_to_cuda(session, device)
    return session


def _keep_weights_in_place(options: ort.SessionOptions) -> None:
    """No copies of the weights in another layout or type: slower runs, in a fraction of the memory."""
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    # In the order of the file a weight is unfolded right before its layer; else all of them come first.
    options.execution_order = ort.ExecutionOrder.PRIORITY_BASED


def _outline(model: ir.Model | bytes | Path) -> Outline:
    if isinstance(model, ir.Model):
        return Outline(bool(model.functions), weight_bytes(model), len(model.graph))
    if isinstance(model, Path):
        return outline_of(model)
    try:
        parsed = onnx.ModelProto.FromString(model)
    except DecodeError:
        return Outline(False, len(model), 0)  # ONNX Runtime, which reads it next, says what is wrong
    return Outline(bool(parsed.functions), len(model), len(parsed.graph.node))


def _open(source: str | bytes, options: ort.SessionOptions) -> ort.InferenceSession:
    try:
        return ort.InferenceSession(
            source, options, providers=["CPUExecutionProvider"], disabled_optimizers=_INEXACT
        )
    except _REFUSALS as error:
        raise ModelError(
            "ONNX Runtime does not load the model.",
            where=source if isinstance(source, str) else None,
            observed=" ".join(str(error).split())[:400],
            hint="Check the model with onnx.checker.check_model; an unknown operator or a type is usual.",
        ) from error


def _from_ir(model: ir.Model, options: ort.SessionOptions, *, lean: bool) -> ort.InferenceSession:
    """A session on the model's own weights: lent to ONNX Runtime, not serialised and parsed again.

    That also lifts protobuf's limit of 2 GB, since only the structure is serialised. Lent weights are copied
    once; where that is too much, those in a file stay there, and ONNX Runtime maps it.
    """
    # ONNX Runtime looks for weights in files in one folder only.
    folders = (str(Path(tensor.base_dir)) for _, tensor in external_values(model))
    folder = next(folders, None) if lean else None
    mapped = {name for name, value in model.graph.initializers.items() if _lies_in(value, folder)}
    outline = self_contained(model, keep=mapped)
    with weights_apart(
        outline, _WORTH_LENDING, lambda name, t: name not in mapped and t.dtype.name in _LENDABLE
    ) as apart:
        serialised = ir.to_proto(outline).SerializeToString()
    lent = {
        name: ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(tensor.numpy()))
        for name, tensor in apart.items()
    }
    if lent:
        options.add_external_initializers(list(lent), list(lent.values()))
    if folder is not None:
        options.add_session_config_entry(_DATA_FOLDER, folder)
    return _open(serialised, options)


def _lies_in(value: ir.Value, folder: str | None) -> bool:
    tensor = value.const_value
    if folder is None or not isinstance(tensor, ir.ExternalTensor) or tensor.nbytes < _WORTH_LENDING:
        return False
    return str(Path(tensor.base_dir)) == folder


def save_heap() -> None:
    """From now on, let the C library (glibc) return large blocks to the system as soon as they are free.

    By default it learns to keep them for reuse, in each thread's own heap, which can double what a run takes.
    Returning them costs time, so that only runs with a limit on memory do it.
    """
    tune = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if tune is not None:
        tune(_MMAP_THRESHOLD, 1 << 18)


def give_memory_back() -> None:
    """Return freed heap to the system where the C library can (glibc).

    Optimising a graph leaves several times the weights' size as free pieces that the allocator would keep,
    and that would count as used while the model runs.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
