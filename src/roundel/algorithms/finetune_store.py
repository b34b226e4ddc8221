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
from roundel.model.cuda import move_to_cuda
from roundel.model.memory import budget
from roundel.types import Sample

_IN_MEMORY = 4  # times what else is kept of one kind: rows of a layer are read again and again


@dataclass(frozen=True, slots=True)
class Store:
    """Allocates arrays as the memory level asks.

    Attributes:
        level: 2 allocates in temporary files that vanish with their array, 0 and 1 only what is large.
    """

    level: Literal[0, 1, 2]

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """An array to be filled."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if size == 0 or (self.level < 2 and size <= _IN_MEMORY * budget().held):
            return np.empty(shape, dtype)
        with tempfile.TemporaryFile(prefix="roundel-") as file:  # the mapping outlives the handle
            return np.memmap(file, dtype, "w+", shape=shape)


class StoredFrontier(Frontier):
    """A frontier whose values lie where the store puts them, on the device that was asked for."""

    def __init__(self, model: ir.Model, samples: Sequence[Sample], store: Store, *, cuda: int | None) -> None:
        room = None if store.level < 2 else 0
        super().__init__(model, samples, threads=max(2, os.cpu_count() or 2), room=room)
        self._cuda = cuda

    def _session(
        self, nodes: Sequence[ir.Node], wanted: Sequence[str]
    ) -> tuple[ort.InferenceSession, list[str]]:
        session, feeds = super()._session(nodes, wanted)
        if self._cuda is not None:
            on_cuda(session, self._cuda)
        return session, feeds


def on_cuda(session: ort.InferenceSession, device: int) -> None:
    """Move a session to a GPU; what has no kernel there stays on the CPU."""
    move_to_cuda(session, device)
