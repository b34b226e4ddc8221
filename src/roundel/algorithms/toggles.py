"""A float model in which any set of its quantizers, of activations and of constants, can be on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.algorithms.switchboard import Wiring
from roundel.calibrate.state import QuantState
from roundel.model.session import open_session
from roundel.numerics.metrics import Closeness
from roundel.recipe import Recipe
from roundel.types import Sample

_THREADS = 2


class Toggles:
    """One session for all sets: with every quantizer on, it is the quantized model.

    Args:
        model: the prepared float model.
        state: says how each tensor is stored.
        tensors: those that can be switched; all are stored in integers.
        recipe: the domain of Q/DQ nodes.
        samples, outputs: inputs, and the float model's own outputs for them.
        threads: samples that run at once.
    """

    def __init__(
        self,
        model: ir.Model,
        state: QuantState,
        tensors: Sequence[str],
        recipe: Recipe,
        samples: Sequence[Sample],
        outputs: Sequence[Sample],
        *,
        threads: int = _THREADS,
    ) -> None:
        self._samples, self._outputs, self._threads = samples, outputs, threads
        self._names = [str(value.name) for value in model.graph.outputs]
        wired = Wiring(model.clone(), state, recipe)
        self._switches = {name: wired.toggle(name) for name in tensors}
        self._session = open_session(wired.model, threads=1, simulate=True)

    def error(self, on: Collection[str], count: int) -> float:
        """Power of the error over that of the outputs, which count alike, for the first `count` samples."""
        chosen = set(on)
        feeds = {switch: np.asarray(name in chosen) for name, switch in self._switches.items()}

        def one(index: int) -> dict[str, Closeness]:
            given = self._session.run(None, {**feeds, **self._samples[index]})
            wanted = self._outputs[index]
            return {
                name: Closeness.of(wanted[name], value)
                for name, value in zip(self._names, given, strict=True)
                if name in wanted and _comparable(wanted[name], value)
            }

        total: dict[str, Closeness] = {}
        with ThreadPoolExecutor(self._threads) as pool:
            for part in pool.map(one, range(min(count, len(self._samples)))):
                for name, close in part.items():
                    total[name] = total.get(name, Closeness()).merge(close)
        shares = [close.noise / close.signal for close in total.values() if close.signal > 0]
        return sum(shares) / len(shares) if shares else 0.0


def _comparable(wanted: NDArray[Any], value: NDArray[Any]) -> bool:
    return wanted.dtype.kind == "f" and wanted.shape == value.shape and bool(np.isfinite(wanted).all())
