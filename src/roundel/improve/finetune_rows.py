"""The rows that fine-tuning learns a layer from, and the codes that least squares finds for them."""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundel.improve.constants import LayerWeights
from roundel.improve.layers import Unit
from roundel.improve.moments import HeldRows, Moments
from roundel.improve.rounding import Problem, solve
from roundel.model.memory import budget
from roundel.state import held_from
from roundel.types import Doubles, QParams

_ROWS = 256  # places of each sample
_GROUPED_WORK = 512  # rows x kernel size of a grouped layer: few weights for each channel need few rows
_LEAST_ROWS = 16
_THREADS = 2  # more of them wait for each other
_MOST_ELEMENTS = 96_000_000  # of one layer's inputs
_IN_MEMORY = 4  # times what else is kept of one kind: rows of a layer are read again and again
_MOST_IN_SAMPLE = 2_000_000  # of one sample's inputs: bounds the time of a step


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A layer's data, row after row and sample after sample.

    Attributes:
        inputs: (n, groups, inputs per output); codes less their zero point, or real or normalized values.
        targets: (n, groups, outputs per group) of the float model, behind the activation.
        linear: the same before the activation, where a solution by least squares is wanted.
        starts: first row of each sample, and the number of rows.
        held_from: first sample that judges instead of teaching.
    """

    inputs: NDArray[Any]
    targets: NDArray[np.float32]
    linear: NDArray[np.float32] | None
    starts: tuple[int, ...]
    held_from: int

    @property
    def first_held(self) -> int:
        """The first row that judges."""
        return self.starts[self.held_from]

    def power(self) -> float:
        """Variance of the judging targets around their channels' means, summed over channels."""
        return float(self.targets[self.judging].var(0, dtype=np.float64).sum())

    @property
    def watching(self) -> NDArray[np.intp]:
        """Rows that say when to stop: of every other held-out sample, or of the others where there is one."""
        some = range(self.held_from, len(self.starts) - 1, 2)
        return self._of(some) if self._several else np.arange(self.first_held)

    @property
    def judging(self) -> NDArray[np.intp]:
        """Rows of the held-out samples that had no part in anything."""
        return self._of(range(self.held_from + self._several, len(self.starts) - 1, 1 + self._several))

    @property
    def _several(self) -> bool:
        return len(self.starts) - 1 - self.held_from > 1

    def _of(self, samples: Iterable[int]) -> NDArray[np.intp]:
        return np.concatenate([np.arange(self.starts[i], self.starts[i + 1]) for i in samples])


def layer_seed(seed: int, layer: str) -> int:
    """A seed for one layer: the same whatever was tuned before it, and by whom."""
    digest = hashlib.blake2b(f"{seed}:{layer}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True, slots=True, eq=False)
class SeenRows:
    """One layer's tensors for all samples.

    Attributes:
        codes: its input in the quantized model.
        linear: its float output before the activation, where wanted.
        outputs: its float output behind the activation.
        params: format of its input; None where `codes` are real numbers already.
    """

    codes: Sequence[NDArray[Any]]
    linear: Sequence[NDArray[Any]] | None
    outputs: Sequence[NDArray[Any]]
    params: QParams | None


def gather_rows(unit: Unit, seen: SeenRows, shape: tuple[int, int, int], seed: int) -> Rows:
    """Look at a few places of each sample.

    Args:
        unit: the layer.
        seen: its tensors.
        shape: of its weights as a matrix.
        seed: of the layer.
    """
    rng = np.random.default_rng(seed)
    most = _most_rows(shape, len(seen.outputs))
    places = [unit.layer.places(out.shape, most, rng) for out in seen.outputs]
    starts = tuple(int(n) for n in np.cumsum([0, *(len(p) for p in places)]))
    groups, channels, size = shape
    dtype = np.dtype(np.float32) if unit.layer.normalizes else narrow_type(seen.params)
    if groups > 1 == channels:  # depthwise: channels side by side, for sums over a few places of each
        inputs = _empty((starts[-1], size, groups), dtype).transpose(0, 2, 1)
    else:
        inputs = _empty((starts[-1], groups, size), dtype)
    targets = _empty((starts[-1], groups, channels), np.dtype(np.float32))
    linear = None if seen.linear is None else _empty(targets.shape, targets.dtype)

    def gather(index: int) -> None:
        out, where, rows = seen.outputs[index], places[index], slice(starts[index], starts[index + 1])
        targets[rows] = unit.layer.targets(out, where)
        inputs[rows] = unit.layer.inputs(_shifted(unit, seen, index), where, out.shape[2:])
        if linear is not None and seen.linear is not None:
            linear[rows] = unit.layer.targets(seen.linear[index], where)

    with ThreadPoolExecutor(_THREADS) as pool:
        deque(pool.map(gather, range(len(places))), maxlen=0)
    return Rows(inputs, targets, linear, starts, held_from(len(seen.outputs)))


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array to be filled: in memory, or what is large in a temporary file that vanishes with it."""
    size = math.prod(shape) * dtype.itemsize
    if size <= _IN_MEMORY * budget().held:
        return np.empty(shape, dtype)
    with tempfile.TemporaryFile(prefix="roundel-") as file:  # the mapping outlives the handle
        return np.memmap(file, dtype, "w+", shape=shape)


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


def _shifted(unit: Unit, seen: SeenRows, index: int) -> NDArray[Any]:
    if seen.params is None:
        return seen.codes[index].astype(np.float32, copy=False)
    whole = seen.codes[index].astype(np.int32) - int(seen.params.zero_point)
    if unit.layer.normalizes:
        return np.asarray(whole * seen.params.scale, np.float32)
    return whole.astype(narrow_type(seen.params))


def _most_rows(shape: tuple[int, int, int], samples: int) -> int:
    groups, _, size = shape
    wanted = max(_LEAST_ROWS, _GROUPED_WORK // size) if groups > 1 else _ROWS
    most = min(_MOST_ELEMENTS // samples, _MOST_IN_SAMPLE) // math.prod((groups, size))
    return max(1, min(wanted, most))


_CHUNK = 16_000_000  # elements of the inputs taken in at once


@dataclass(frozen=True, slots=True, eq=False)
class Solved:
    """Least-squares codes at the present scale.

    Attributes:
        taught: from the rows to learn from alone, so that the held-out rows can judge them.
        whole: from all rows, as those of `choose_rounding` are; these are used where `taught` wins.
    """

    taught: Doubles
    whole: Doubles


def solved_codes(weights: LayerWeights, rows: Rows) -> Solved | None:
    """Codes solved anew; None where nothing was rounded before or zero points differ between channels.

    A layer that `choose_rounding` has rounded was rounded for the inputs of that time. Tuning the layers
    before it changes them, and learning from stale codes ends in a worse place than solving anew first.
    """
    if weights.low.size != 1 or rows.linear is None:
        return None
    middle = rows.starts[max(1, held_from(rows.held_from))]
    early, late = _moments(rows, 0, middle), _moments(rows, middle, rows.first_held)
    train = Moments()
    train.merge(early)
    train.merge(late)
    held = _held(rows, middle, rows.first_held), _held(rows, rows.first_held, rows.starts[-1])
    return Solved(_solve(weights, early, held[0]), _solve(weights, train, held[1]))


def _held(rows: Rows, first: int, last: int) -> HeldRows:
    """These rows, or all where there are none."""
    assert rows.linear is not None
    some = slice(first, last) if first < last else slice(None)
    given, wanted = (side[some].transpose(1, 0, 2) for side in (rows.inputs, rows.linear))
    return HeldRows(np.asarray(given, np.float32), np.asarray(wanted, np.float32))


def _moments(rows: Rows, first: int, last: int) -> Moments:
    sums = Moments()
    assert rows.linear is not None
    for some in _chunks(rows, first, last):
        given, wanted = (side[some].transpose(1, 0, 2) for side in (rows.inputs, rows.linear))
        sums.add(np.asarray(given, np.float32), np.asarray(wanted, np.float32))
    return sums


def _chunks(rows: Rows, first: int, last: int) -> Iterator[slice]:
    width = max(1, _CHUNK // (rows.inputs.shape[1] * rows.inputs.shape[2]))
    for start in range(first, last, width):
        yield slice(start, min(start + width, last))


def _solve(weights: LayerWeights, train: Moments, held: HeldRows) -> Doubles:
    problem = Problem(
        weight=weights.real,
        bias=weights.bias,
        has_bias=weights.bias_params is not None,
        input_scale=weights.input_scale,
        scale=weights.scale,
        limits=(int(weights.low.item()), int(weights.high.item())),
        factors=(1.0,),
        train=train,
        held=held,
    )
    return solve(problem).codes
