"""Models that run over data in parts: here, in other processes, or as a checkpoint remembers.

Whoever compares, evaluates or ranks says what one part of the data gives, as plain arrays that merge; where
the parts are worked on, and what is written down, is settled here.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from roundel.calibrate.runner import run_session
from roundel.data.arrays import fixed_batch
from roundel.model import load_model
from roundel.model.files import Portable, external_values
from roundel.model.graph import fingerprint, input_specs
from roundel.model.session import open_session
from roundel.model.structure import ModelSource
from roundel.qdq.functions import attach
from roundel.qdq.names import QUARK
from roundel.types import Arrays, Sample
from roundel.work.executors import PartT, Task, Work, mapped


def answers(
    work: Work,
    step: str,
    key: Callable[[], Mapping[str, str]],
    task: Task[PartT],
    parts: Iterable[PartT],
) -> Iterator[tuple[PartT, Arrays]]:
    """Every part with what the task makes of it, in the order of the parts.

    Args:
        work: where, and what is remembered.
        step: the name under which it is remembered.
        key: what the results depend on besides the parts.
        task: turns parts into arrays; it travels by pickle where work is done elsewhere.
        parts: of the data.
    """
    memory = None if work.store is None else work.memory(step, key())
    return mapped(work, task, parts, memory)


class Travelling:
    """A model that is itself in this process, and plain bytes and arrays on its way to another."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (Portable.of(self.model),)


def _arrived(portable: Portable) -> Travelling:
    return Travelling(portable.model())


class Predictor:
    """A model, float or quantized, that takes samples of any number of rows.

    Its session computes Q/DQ nodes exactly as written, whatever the CPU. In another process, it arrives as a
    `PackedPredictor`.

    Args:
        source: an ONNX file, serialised bytes, a ModelProto, or an onnx-ir model.
        threads: that it computes with; None for every core.
    """

    def __init__(self, source: ModelSource, *, threads: int | None = None) -> None:
        loaded = load_model(source, allow_quantized=True, opaque=QUARK)
        self.model: ir.Model = loaded.model
        self.path = loaded.path
        self.name = loaded.path.name if loaded.path else "in memory"
        self.file_bytes = loaded.file_bytes
        self.inputs = input_specs(loaded.model)
        self._batch = fixed_batch(self.inputs)
        # A file runs as it is, not as loading has normalised it; only AMD's operators may lack their bodies.
        custom = any(node.domain == QUARK for node in loaded.model.graph.all_nodes())
        runs: ir.Model | Path = loaded.path if loaded.path and not custom else attach(loaded.model)
        self._session: ort.InferenceSession = open_session(runs, threads=threads, simulate=True)
        self.outputs = tuple(out.name for out in self._session.get_outputs())

    def run(self, sample: Sample, index: int) -> dict[str, NDArray[Any]]:
        """All outputs for one sample.

        Where the model has fixed its batch, rows are cut to it; the last part is filled up by repeating its
        last row, and the results for the repetitions are dropped.

        Args:
            sample: the inputs, with the same number of rows each.
            index: its position, for messages.

        Raises:
            DataError: the sample does not fit the model.
            ModelError: ONNX Runtime cannot run the model.
        """
        names = list(self.outputs)
        rows = {len(array) for array in sample.values() if array.ndim}
        if self._batch is None or rows == {self._batch} or len(rows) != 1:
            return run_session(self._session, names, sample, index)
        count, parts = rows.pop(), []
        for start in range(0, count, self._batch):
            part = {name: _filled(a[start : start + self._batch], self._batch) for name, a in sample.items()}
            results = run_session(self._session, names, part, index)
            kept = min(self._batch, count - start)
            parts.append({name: a[:kept] if _has_rows(a, self._batch) else a for name, a in results.items()})
        return {name: np.concatenate([np.atleast_1d(part[name]) for part in parts]) for name in names}

    def open(self, threads: int) -> Predictor:
        """Itself: it is open."""
        return self

    def digest(self) -> str:
        """Of the model: of its files as they are, or of what is in memory."""
        if self.path is None:
            return fingerprint(self.model)
        digest = hashlib.blake2b(digest_size=16)
        for name, content in sorted(self._files(self.path).items()):
            digest.update(f"{len(name)} {name} {len(content)} ".encode() + content)
        return digest.hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path is None:
            return PackedPredictor, ("", {}, Portable.of(self.model))
        return PackedPredictor, (self.path.name, self._files(self.path), None)

    def _files(self, path: Path) -> dict[str, bytes]:
        beside = {Path(tensor.path).resolve() for _, tensor in external_values(self.model)}
        home = path.resolve().parent
        others = {str(file.relative_to(home)): file.read_bytes() for file in beside}
        return {path.name: path.read_bytes(), **others}


@dataclass(frozen=True, slots=True, eq=False)
class PackedPredictor:
    """A predictor in another process, before it has a session.

    Attributes:
        name: of the model's file; "" for a model in memory.
        files: of the model, as they are.
        portable: the model in memory.
    """

    name: str
    files: dict[str, bytes]
    portable: Portable | None

    def open(self, threads: int) -> Predictor:
        """With a session of so many threads."""
        if self.portable is not None:
            return Predictor(self.portable.model(), threads=threads)
        with tempfile.TemporaryDirectory(prefix="roundel-") as folder:
            for name, content in self.files.items():
                file = Path(folder, name)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            return Predictor(Path(folder, self.name), threads=threads)


def _filled(rows: NDArray[Any], count: int) -> NDArray[Any]:
    missing = count - len(rows)
    return rows if not missing else np.concatenate([rows, np.repeat(rows[-1:], missing, axis=0)])


def _has_rows(array: NDArray[Any], batch: int) -> bool:
    return array.ndim > 0 and len(array) == batch
