"""Where fine-tuning keeps its arrays: in memory, or in memory-mapped temporary files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from roundel.algorithms.frontier import Frontier
from roundel.types import Sample


@dataclass(frozen=True, slots=True)
class Store:
    """Allocates arrays as the memory level asks.

    Attributes:
        level: 0 and 1 allocate in memory, 2 in temporary files that vanish with their array.
    """

    level: Literal[0, 1, 2]

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """An array to be filled."""
        if self.level < 2 or 0 in shape:
            return np.empty(shape, dtype)
        with tempfile.TemporaryFile(prefix="roundel-") as file:  # the mapping outlives the handle
            return np.memmap(file, dtype, "w+", shape=shape)

    def keep(self, array: NDArray[Any]) -> NDArray[Any]:
        """The array itself, or a copy on disk."""
        if self.level < 2 or isinstance(array, np.memmap):
            return array
        kept = self.empty(array.shape, array.dtype)
        kept[...] = array
        return kept


class StoredFrontier(Frontier):
    """A frontier whose values lie where the store puts them, on the device that was asked for."""

    def __init__(self, model: ir.Model, samples: Sequence[Sample], store: Store, *, cuda: int | None) -> None:
        super().__init__(model, samples, threads=max(2, os.cpu_count() or 2))
        self._store, self._cuda = store, cuda

    def reach(self, name: str) -> list[NDArray[Any]]:
        """As in `Frontier`; with memory level 2 nothing that was computed stays in memory."""
        found = super().reach(name)
        if self._store.level < 2:
            return found
        self.values = {key: [self._store.keep(a) for a in arrays] for key, arrays in self.values.items()}
        return self.values[name]

    def _session(
        self, nodes: Sequence[ir.Node], wanted: Sequence[str]
    ) -> tuple[ort.InferenceSession, list[str]]:
        session, feeds = super()._session(nodes, wanted)
        if self._cuda is not None:
            on_cuda(session, self._cuda)
        return session, feeds


def on_cuda(session: ort.InferenceSession, device: int) -> None:
    """Move a session to a GPU; what has no kernel there stays on the CPU."""
    session.set_providers(["CUDAExecutionProvider", "CPUExecutionProvider"], [{"device_id": str(device)}, {}])
