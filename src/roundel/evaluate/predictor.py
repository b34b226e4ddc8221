"""A model, float or quantized, that takes samples of any number of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from roundel.calibrate.runner import run_session
from roundel.data.batching import fixed_batch
from roundel.model import load_model
from roundel.model.graph import input_specs
from roundel.model.load import ModelSource
from roundel.model.session import open_session
from roundel.qdq.functions import AMD_DOMAIN, attach
from roundel.types import Sample


class Predictor:
    """A session that computes Q/DQ nodes exactly as written, whatever the CPU.

    Args:
        source: an ONNX file, serialised bytes, a ModelProto, or an onnx-ir model.
        threads: that it computes with; None for every core.
    """

    def __init__(self, source: ModelSource, *, threads: int | None = None) -> None:
        loaded = load_model(source, allow_quantized=True, opaque=AMD_DOMAIN)
        self.model: ir.Model = loaded.model
        self.path = loaded.path
        self.name = loaded.path.name if loaded.path else "in memory"
        self.file_bytes = loaded.file_bytes
        self.inputs = input_specs(loaded.model)
        self._batch = fixed_batch(self.inputs)
        # A file runs as it is, not as loading has normalised it; only AMD's operators may lack their bodies.
        custom = any(node.domain == AMD_DOMAIN for node in loaded.model.graph.all_nodes())
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


def _filled(rows: NDArray[Any], count: int) -> NDArray[Any]:
    missing = count - len(rows)
    return rows if not missing else np.concatenate([rows, np.repeat(rows[-1:], missing, axis=0)])


def _has_rows(array: NDArray[Any], batch: int) -> bool:
    return array.ndim > 0 and len(array) == batch
