"""Runs a float model and hands out the tensors asked for, within a bound on memory."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from roundel.calibrate.masks import masked_tensors
from roundel.errors import DataError, ModelError
from roundel.model.graph import values_by_name
from roundel.model.memory import budget
from roundel.model.session import open_session
from roundel.types import Array, Sample

_MODEL_FAULTS = (ort_state.NotImplemented, ort_state.EPFail, ort_state.InvalidGraph)
_RUN_FAULTS = (ort_state.Fail, ort_state.RuntimeException, ort_state.InvalidArgument)
_MESSAGE_LIMIT = 400


@dataclass(frozen=True, slots=True)
class Extremes:
    """What the graph itself found about one tensor."""

    low: float
    high: float
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One run: tensors of a group, extremes of others, the model's own outputs if asked for, the time."""

    tensors: dict[str, Array]
    extremes: dict[str, Extremes]
    finals: Sample
    seconds: float


class Runner:
    """Sessions over clones of a model with the requested tensors as extra outputs.

    Full graph optimisation stays on: ONNX Runtime keeps every graph output as written. Tensors of which only
    the extremes count are reduced inside the graph (as fast as fetching them, and their memory is free again
    at once); the others are fetched. What an attention mask hides comes as `Mask.tamed` has it.

    Several samples run at once with one thread each, instead of one sample on all threads: nothing waits
    at the end of each operator, and observing runs in parallel with other samples' operators. Memory may
    forbid it; then fewer samples share the cores.

    Args:
        model: the float model; it is not changed.
        tensors: computed tensors of its main graph, in topological order.
        first: a sample that tells how large they are.
        cores: how many threads may work in all.
        samples: the most samples that can run at once.
        extremes: of these tensors a run brings only the smallest and the largest value.
        device: the number of the GPU that runs the model, or None for the CPU.
    """

    def __init__(
        self,
        model: ir.Model,
        tensors: Sequence[str],
        first: Sample,
        *,
        cores: int,
        samples: int,
        extremes: Collection[str] = (),
        device: int | None = None,
    ) -> None:
        self._model = model
        self._masks = masked_tensors(model.graph)
        extremes = [name for name in extremes if name not in self._masks]
        self._spare: dict[str, Any] = {}
        self._finals = [value.name for value in model.graph.outputs if value.name]
        self._reduced = [name for name in tensors if name in extremes]
        tensors = [name for name in tensors if name not in extremes]
        # Of all runs in flight; a sample that needs more runs once per group of tensors.
        most = budget().live
        sizes = tensor_bytes(model, tensors, first)
        groups = grouped(tensors, sizes, most)
        live = max(sum(sizes[name] for name in group) for group in groups)
        # With nothing to observe in numpy there is nothing to overlap: one sample at a time saves memory.
        self.workers = max(1, min(cores, samples, most // max(live, 1))) if tensors else 1
        threads = max(1, cores // self.workers)
        self._sessions = [
            (open_session(self._augmented(group, first=i == 0), threads=threads, device=device), group)
            for i, group in enumerate(groups)
        ]
        self._threads, self._device = threads, device

    def _augmented(self, group: Sequence[str], *, first: bool) -> ir.Model:
        return _with_outputs(self._model, group, keep_own=first, reduced=self._reduced if first else ())

    def stream(self, sample: Sample, index: int, *, finals: bool) -> Iterator[Run]:
        """The requested tensors of one sample, group by group. Safe to call from several threads.

        Args:
            sample: the model's inputs.
            index: its position, for messages.
            finals: whether the first group also brings the model's own outputs.

        Raises:
            DataError: the sample does not fit the model.
            ModelError: ONNX Runtime cannot run the model.
        """
        for position, (session, group) in enumerate(self._sessions):
            own = self._finals if finals and position == 0 else []
            reduced = self._reduced if position == 0 else []
            names = list(dict.fromkeys([*group, *own, *(n for name in reduced for n in _ends(name))]))
            start = time.perf_counter()
            # An empty list would mean every output to ONNX Runtime.
            arrays = run_session(session, names or self._finals, sample, index)
            seconds = time.perf_counter() - start
            # A final tensor may be observed in a later group: it must not count twice.
            tensors = {name: arrays[name] for name in group}
            tensors |= {
                name: mask.tamed(tensors[name]) for name, mask in self._masks.items() if name in tensors
            }
            extremes: dict[str, Extremes] = {}
            for name in reduced:
                low, high, total, count = (arrays[end] for end in _ends(name))
                # A maximum may overlook NaN; a sum cannot, but it may overflow: then the tensor decides.
                if count == 0 or np.isfinite([low, high, total]).all():
                    extremes[name] = Extremes(float(low), float(high), int(count))
                else:
                    tensors[name] = self._fetch(name, sample, index)
            yield Run(tensors, extremes, {name: arrays[name] for name in own}, seconds)

    def _fetch(self, name: str, sample: Sample, index: int) -> Array:
        session = self._spare.get(name)
        if session is None:
            # Another thread may open it, too; the later one stays.
            alone = _with_outputs(self._model, [name], keep_own=False)
            session = open_session(alone, threads=self._threads, device=self._device)
            self._spare[name] = session
        return run_session(session, [name], sample, index)[name]


def run_session(session: Any, names: list[str], sample: Sample, index: int) -> dict[str, Array]:
    """One run; ONNX Runtime's exceptions become errors that name the sample.

    Raises:
        DataError: the sample does not fit the model.
        ModelError: ONNX Runtime cannot run the model.
    """
    try:
        outputs = session.run(names, sample)
    except _MODEL_FAULTS as error:
        raise ModelError(
            "ONNX Runtime cannot run this model.", where=f"sample {index}", observed=_trim(error)
        ) from error
    except (*_RUN_FAULTS, ValueError, RuntimeError) as error:
        # ONNX Runtime's Python layer raises ValueError for missing inputs and RuntimeError for arrays of
        # types that numpy has only by extension (bfloat16, 8-bit floats).
        raise DataError(
            "The model could not run a sample.",
            where=f"sample {index}",
            observed=_trim(error),
            expected=", ".join(f"{i.name}: {i.type} {i.shape}" for i in session.get_inputs()),
            hint="Check names, types, shapes. Random samples guess open dimensions (--shape x=1x3x48x320).",
        ) from error
    return dict(zip(names, outputs, strict=True))


_REDUCTIONS = ("ReduceMin", "ReduceMax", "ReduceSum", "Size")


def _ends(name: str) -> tuple[str, ...]:
    return tuple(f"roundel_{op}:{name}" for op in _REDUCTIONS)


def _with_outputs(
    model: ir.Model, names: Sequence[str], *, keep_own: bool, reduced: Sequence[str] = ()
) -> ir.Model:
    clone = model.clone()
    values = values_by_name(clone.graph)
    if not keep_own:
        clone.graph.outputs.clear()
    present = {value.name for value in clone.graph.outputs}
    clone.graph.outputs.extend(values[name] for name in names if name not in present)
    for tensor in reduced:
        _reduce(clone.graph, values[tensor])
    return clone


def _reduce(graph: ir.Graph, value: ir.Value) -> None:
    """Min, max, sum and size as outputs."""
    for op, name in zip(_REDUCTIONS, _ends(str(value.name)), strict=True):
        size = op == "Size"
        out = _output_behind(graph, ir.node(op, [value], {} if size else {"keepdims": 0}), name)
        out.shape = ir.Shape(())
        out.type = ir.TensorType(ir.DataType.INT64) if size else value.type


def _output_behind(graph: ir.Graph, node: ir.Node, name: str) -> ir.Value:
    """The node as an output, right behind what it reads: at the end it would keep that alive."""
    value = node.inputs[0]
    maker = None if value is None else value.producer()
    if maker is None:
        graph.append(node)
    else:
        graph.insert_after(maker, node)
    out = node.outputs[0]
    out.name = name
    graph.outputs.append(out)
    return out


def tensor_bytes(model: ir.Model, tensors: Sequence[str], first: Sample) -> dict[str, int]:
    """How large tensors are; what declared shapes do not tell, a run of the first sample tells."""
    declared = _declared_bytes(model, tensors, first)
    return _measured_bytes(model, tensors, first) if declared is None else declared


def _declared_bytes(model: ir.Model, tensors: Sequence[str], first: Sample) -> dict[str, int] | None:
    """Sizes from declared shapes, with open dimensions bound by the first sample; None when unknown."""
    bound: dict[str, int] = {}
    for value in model.graph.inputs:
        fed = first.get(value.name or "")
        if value.shape is None or fed is None or fed.ndim != len(value.shape):
            continue
        pairs = zip(value.shape, fed.shape, strict=True)
        bound |= {str(d.value): n for d, n in pairs if isinstance(d, ir.SymbolicDim) and d.value}
    values = values_by_name(model.graph)
    sizes: dict[str, int] = {}
    for name in tensors:
        shape = values[name].shape
        if shape is None:
            return None
        dims = [d if isinstance(d, int) else bound.get(str(d.value)) for d in shape]
        known = [d for d in dims if d is not None]
        if len(known) != len(dims):
            return None
        sizes[name] = math.prod(known) * _item_bytes(values[name])
    return sizes


def _measured_bytes(model: ir.Model, tensors: Sequence[str], first: Sample) -> dict[str, int]:
    """One run that returns element counts only, so that it needs no more memory than a plain run."""
    clone = model.clone()
    values = values_by_name(clone.graph)
    clone.graph.outputs.clear()
    names = [f"roundel_size_{position}" for position in range(len(tensors))]
    for tensor, name in zip(tensors, names, strict=True):
        out = _output_behind(clone.graph, ir.node("Size", [values[tensor]]), name)
        out.dtype = ir.DataType.INT64
    counts = run_session(open_session(clone), names, first, 0)
    return {
        tensor: int(counts[name]) * _item_bytes(values[tensor])
        for tensor, name in zip(tensors, names, strict=True)
    }


def grouped(tensors: Sequence[str], sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Neighbours together, up to so many bytes; at least one tensor in each group."""
    groups: list[list[str]] = [[]]
    live = 0
    for name in tensors:
        if groups[-1] and live + sizes[name] > most:
            groups.append([])
            live = 0
        groups[-1].append(name)
        live += sizes[name]
    return groups


def _item_bytes(value: ir.Value) -> int:
    return 4 if value.dtype is None else math.ceil(value.dtype.itemsize)


def _trim(error: Exception) -> str:
    # ONNX Runtime puts source paths and build details first; what a reader needs comes last.
    text = " ".join(str(error).split())
    return text if len(text) <= _MESSAGE_LIMIT else "… " + text[-_MESSAGE_LIMIT:]
