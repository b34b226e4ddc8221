"""A frontier whose large values lie on disk."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from roundel.algorithms.finetune_store import Store
from roundel.algorithms.frontier import Frontier

_IN_MEMORY = 128_000_000  # bytes of one tensor over all samples


class SpillingFrontier(Frontier):
    """Keeps a tensor in temporary files where all samples' values of it together would be large."""

    def _kept(self, array: NDArray[Any]) -> NDArray[Any]:
        return Store(2).keep(array) if array.nbytes * self._count > _IN_MEMORY else array
