"""Biases that make up for what rounding shifts, in layers whose weights have no codes to choose between.

The error of a rounded layer has a mean that does not average out over a sample: it shifts whole channels, and
the layers behind add such shifts up. Layer by layer, on the corrected layers before, the mean goes into the
bias.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from roundel.improve.constants import Changed, Constants, Held, Written
from roundel.improve.layers import runs_quantized
from roundel.improve.stepwise import StepwiseRunner
from roundel.model.graph import attribute_float, constant_array, dims
from roundel.numerics.metrics import layer_db
from roundel.plan.types import QuantPlan
from roundel.recipe.settings import Recipe
from roundel.state import LayerReport, State, held_from
from roundel.targets.operators import Trait, ops_with
from roundel.types import Doubles, Listener, Sample

_MOST_SAMPLES = 32  # a mean needs no more, and a layer's outputs stay in memory as real numbers
_IMAGES = ops_with(Trait.CONV)


@dataclass(frozen=True, slots=True)
class Shift:
    """A node that adds a constant to each channel.

    Attributes:
        node: its name.
        op: its operator.
        constant: the name of what it adds.
        axis: of its output's channels.
        factor: on the constant.
    """

    node: str
    op: str
    constant: str
    axis: int
    factor: float


def correct_biases(
    model: ir.Model,
    state: State,
    samples: Sequence[Sample],
    recipe: Recipe,
    progress: Listener | None = None,
) -> tuple[State, tuple[LayerReport, ...]]:
    """Shift biases in graph order; a channel is left alone where its held-out error would not fall.

    Args:
        model: the prepared float model.
        state: says how it is stored.
        samples: inputs; the last fifth judges.
        recipe: formats.
        progress: told the number of layers, and how many are done.
    """
    shifts = list(find_shifts(model.graph, state.plan))
    used = samples[:_MOST_SAMPLES]
    if not shifts or len(used) < 2:
        return state, ()
    if progress is not None:
        progress.step("correct biases", len(shifts))
    work = _Correction(model, state, used, recipe)
    reports = []
    for done, shift in enumerate(shifts, 1):
        reports.append(work.correct(shift))
        if progress is not None:
            progress.advance(done)
    return work.constants.state, tuple(reports)


def find_shifts(graph: ir.Graph, plan: QuantPlan) -> Iterator[Shift]:
    """Layers with a bias, and additions of one number for each channel, stored in a type without codes."""
    for node in graph:
        index = _constant_index(node) if runs_quantized(node, plan) else None
        value = None if index is None else node.inputs[index]
        array, known = constant_array(value), None if value is None else dims(node.outputs[0])
        if value is None or array is None or array.ndim != 1 or len(value.uses()) != 1 or not known:
            continue
        name, axis = str(value.name), 1 if node.op_type in _IMAGES else -1
        factor = attribute_float(node, "beta", 1.0) if node.op_type == "Gemm" else 1.0
        stored = name in plan.tensors and not plan.in_integers(name)
        if stored and factor and known[axis] == array.size:
            yield Shift(str(node.name), node.op_type, name, axis, factor)


def _constant_index(node: ir.Node) -> int | None:
    if node.op_type in (*_IMAGES, "Gemm"):
        return 2 if len(node.inputs) > 2 else None
    if node.op_type != "Add":
        return None
    return next((i for i in (0, 1) if constant_array(node.inputs[i]) is not None), None)


class _Correction:
    def __init__(self, model: ir.Model, state: State, samples: Sequence[Sample], recipe: Recipe) -> None:
        self.constants = Constants(model.graph, state, recipe)
        self._written = Written.of(model, state, recipe)
        self._short = StepwiseRunner(self._written.model, samples)
        self._plain = StepwiseRunner(state.truth, samples)
        self._made = {str(node.name): str(node.outputs[0].name) for node in model.graph}
        self._learn = held_from(len(samples))

    def correct(self, shift: Shift) -> LayerReport:
        """One layer; everything behind it sees the corrected values."""
        start = time.perf_counter()
        name = self._written.output_of(shift.node)
        got, wanted = self._short.run_to(name), self._plain.run_to(self._made[shift.node])
        learn, judge = slice(0, self._learn), slice(self._learn, None)
        stored = self.constants.format_of(shift.constant)
        assert isinstance(stored, Held)
        old = stored.hold(self.constants.stored(shift.constant)[0])
        missing = _sums(got[learn], wanted[learn], shift.axis).mean
        new = stored.hold(old + missing / shift.factor)
        held = _sums(got[judge], wanted[judge], shift.axis)
        moved = (new.astype(np.float64) - old) * shift.factor
        # The mean of (d - m) squared, from the sums that are there: d is what is missing, m the move.
        after = held.square - 2 * moved * held.mean + moved**2
        better = after < held.square
        if better.any():
            content = np.where(better, new, old).astype(np.float32)
            self._take(shift, content, np.where(better, moved, 0.0), name)
        errors = (held.square.sum(), np.where(better, after, held.square).sum())
        before_db, after_db = (layer_db(held.power, float(error)) for error in errors)
        seconds = time.perf_counter() - start
        self._short.release()
        self._plain.release()
        return LayerReport(shift.node, shift.op, before_db, after_db, bool(better.any()), seconds)

    def _take(self, shift: Shift, content: NDArray[np.float32], moved: Doubles, name: str) -> None:
        changed: Changed = {shift.constant: (content, None)}
        self.constants.take(changed)
        self._written.replace(changed)
        # The layer has run: what it gave moves by as much as its bias.
        before = self._short.values[name]
        self._short.change(
            name, (array + _along(moved, array.ndim, shift.axis).astype(array.dtype) for array in before)
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Sums:
    """Of what is missing in each channel: its mean and mean square; and the signal's power in all."""

    mean: Doubles
    square: Doubles
    power: float


def _sums(got: Sequence[NDArray[Any]], wanted: Sequence[NDArray[Any]], axis: int) -> _Sums:
    missing = _moments((b - a for a, b in zip(got, wanted, strict=True)), axis)
    signal = _moments(wanted, axis)
    return _Sums(*missing, float((signal[1] - signal[0] ** 2).sum()))


def _moments(arrays: Iterable[NDArray[Any]], axis: int) -> tuple[Doubles, Doubles]:
    """The mean and the mean square of each channel."""
    count, first, second = 0.0, np.zeros(()), np.zeros(())
    for array in arrays:
        rest = tuple(i for i in range(array.ndim) if i != axis % array.ndim)
        count += array.size / array.shape[axis]
        first = first + array.sum(rest, dtype=np.float64)
        second = second + np.square(array).sum(rest, dtype=np.float64)
    return np.asarray(first / count), np.asarray(second / count)


def _along(numbers: Doubles, ndim: int, axis: int) -> Doubles:
    shape = [1] * ndim
    shape[axis] = -1
    return numbers.reshape(shape)
