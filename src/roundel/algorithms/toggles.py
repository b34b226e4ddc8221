"""A float model in which any set of its quantizers, of activations and of constants, can be on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx_ir as ir

from roundel.algorithms.output_error import Errors, OutputErrors, together
from roundel.algorithms.switchboard import Wiring
from roundel.calibrate.state import QuantState
from roundel.model.session import open_session
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
        self._errors = OutputErrors(model.graph)
        wired = Wiring(model.clone(), state, recipe)
        self._switches = {name: wired.toggle(name) for name in tensors}
        self._session = open_session(wired.model, threads=1, simulate=True)

    def error(self, on: Collection[str], count: int) -> float:
        """Power of the error over that of the outputs, which count alike, for the first `count` samples."""
        chosen = set(on)
        feeds = {switch: np.asarray(name in chosen) for name, switch in self._switches.items()}

        def one(index: int) -> Errors:
            given = self._session.run(None, {**feeds, **self._samples[index]})
            return self._errors.of(self._outputs[index], given)

        with ThreadPoolExecutor(self._threads) as pool:
            total = together(pool.map(one, range(min(count, len(self._samples)))))
        return total.noise / total.signal if total.signal > 0 else 0.0
