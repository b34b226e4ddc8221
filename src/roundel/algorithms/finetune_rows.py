"""The rows a layer learns from: what it sees in the quantized model and what it should give."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundel.algorithms.finetune_store import Store
from roundel.algorithms.finetune_units import Unit
from roundel.algorithms.held_out import held_out
from roundel.types import QParams

_ROWS = 256  # places of each sample
_GROUPED_WORK = 512  # rows x kernel size of a grouped layer: few weights for each channel need few rows
_LEAST_ROWS = 16
_MOST_ELEMENTS = 96_000_000  # of one layer's inputs
_MOST_IN_SAMPLE = 2_000_000  # of one sample's inputs: bounds the time of a step


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A layer's data, row after row and sample after sample.

    Attributes:
        inputs: (n, groups, inputs per output); codes less their zero point, or real or normalized values.
        plain: the float branch's inputs in the same unit, where the settings mix the two.
        targets: (n, groups, outputs per group) of the float model, behind the activation.
        linear: the same before the activation, where the walk's solution is wanted.
        starts: first row of each sample, and the number of rows.
        held_from: first sample that judges instead of teaching.
    """

    inputs: NDArray[Any]
    plain: NDArray[Any] | None
    targets: NDArray[np.float32]
    linear: NDArray[np.float32] | None
    starts: tuple[int, ...]
    held_from: int

    @property
    def first_held(self) -> int:
        """The first row that judges."""
        return self.starts[self.held_from]

    def power(self) -> float:
        """Variance of the held-out targets around their channels' means, summed over channels."""
        return float(self.targets[self.first_held :].var(0, dtype=np.float64).sum())


def held_from(samples: int) -> int:
    """The number of the first sample of the last fifth."""
    return samples - held_out(samples)


def layer_seed(seed: int, layer: str) -> int:
    """A seed for one layer: the same whatever was tuned before it, and by whom."""
    digest = hashlib.blake2b(f"{seed}:{layer}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """One layer's tensors for all samples.

    Attributes:
        codes: its input in the quantized model.
        plain: its input in the float model, where wanted.
        linear: its float output before the activation, where wanted.
        outputs: its float output behind the activation.
        params: format of its input; None where `codes` are real numbers already.
    """

    codes: Sequence[NDArray[Any]]
    plain: Sequence[NDArray[Any]] | None
    linear: Sequence[NDArray[Any]] | None
    outputs: Sequence[NDArray[Any]]
    params: QParams | None


def gather(unit: Unit, seen: Seen, shape: tuple[int, int, int], store: Store, seed: int) -> Rows:
    """Look at a few places of each sample.

    Args:
        unit: the layer.
        seen: its tensors.
        shape: of its weights as a matrix.
        store: allocates the rows.
        seed: of the layer.
    """
    rng = np.random.default_rng(seed)
    most = _most_rows(shape, len(seen.outputs))
    places = [unit.layer.places(out.shape, most, rng) for out in seen.outputs]
    starts = tuple(int(n) for n in np.cumsum([0, *(len(p) for p in places)]))
    groups, channels, size = shape
    dtype = np.dtype(np.float32) if unit.normalizes or store.level == 0 else narrow_type(seen.params)
    inputs = store.empty((starts[-1], groups, size), dtype)
    plain = None
    if seen.plain is not None:
        plain = store.empty((starts[-1], groups, size), np.dtype(np.float32))
    targets = store.empty((starts[-1], groups, channels), np.dtype(np.float32))
    linear = None if seen.linear is None else store.empty(targets.shape, targets.dtype)
    for index, (out, where) in enumerate(zip(seen.outputs, places, strict=True)):
        rows = slice(starts[index], starts[index + 1])
        spatial = out.shape[2:]
        targets[rows] = unit.layer.targets(out, where)
        inputs[rows] = unit.layer.inputs(_shifted(unit, seen, index), where, spatial)
        if linear is not None and seen.linear is not None:
            linear[rows] = unit.layer.targets(seen.linear[index], where)
        if plain is not None and seen.plain is not None:
            plain[rows] = unit.layer.inputs(_plain(unit, seen.plain[index], seen.params), where, spatial)
    return Rows(inputs, plain, targets, linear, starts, held_from(len(seen.outputs)))


def narrow_type(params: QParams | None) -> np.dtype[Any]:
    """The smallest integer type that holds every code less the zero point; float32 for real numbers."""
    if params is None:
        return np.dtype(np.float32)
    zero = int(params.zero_point)
    low, high = params.qtype.qmin - zero, params.qtype.qmax - zero
    for name in ("int8", "uint8", "int16"):
        limits = np.iinfo(name)
        if limits.min <= low and high <= limits.max:
            return np.dtype(name)
    return np.dtype(np.int32)


def _shifted(unit: Unit, seen: Seen, index: int) -> NDArray[Any]:
    if seen.params is None:
        return seen.codes[index].astype(np.float32, copy=False)
    whole = seen.codes[index].astype(np.int32) - int(seen.params.zero_point)
    if unit.normalizes:
        return np.asarray(whole * seen.params.scale, np.float32)
    return whole.astype(narrow_type(seen.params))


def _plain(unit: Unit, array: NDArray[Any], params: QParams | None) -> NDArray[Any]:
    return array if unit.normalizes or params is None else np.asarray(array / params.scale, np.float32)


def _most_rows(shape: tuple[int, int, int], samples: int) -> int:
    groups, _, size = shape
    wanted = max(_LEAST_ROWS, _GROUPED_WORK // size) if groups > 1 else _ROWS
    most = min(_MOST_ELEMENTS // samples, _MOST_IN_SAMPLE) // math.prod((groups, size))
    return max(1, min(wanted, most))
